"""The systemd units, read by systemd itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deploy/systemd"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", ["tba-buffer.service", "tba-search@0-6.service", "tba-train@7.service", "tba.target"])
def test_systemd_finds_nothing_wrong_with_a_unit(unit, tmp_path):
    for source in UNITS.iterdir():
        text = source.read_text()
        # The program is at its installed place on a node; here any executable stands for it.
        (tmp_path / source.name).write_text(text.replace("/opt/tba/bin/tba", "/bin/true"))
    if "@" in unit:
        template = f"{unit.split('@')[0]}@.service"
        (tmp_path / unit).write_text((tmp_path / template).read_text())
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_every_role_stays_down_on_a_bad_configuration():
    services = sorted(UNITS.glob("*.service"))
    assert len(services) == 3
    for service in services:
        assert "RestartPreventExitStatus=78 2" in service.read_text(), service
