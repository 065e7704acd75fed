"""The systemd units, verified by systemd."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tba.common.config.search import SearchSection
from tba.common.system.watchdog import WARMUP_TIMES

UNITS = Path(__file__).parents[3] / "deploy/systemd"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", ["tba-buffer.service", "tba-search@0-6.service", "tba-train@7.service", "tba.target"])
def test_systemd_accepts_a_unit(unit, tmp_path):
    for source in UNITS.iterdir():
        text = source.read_text()
        # The program is installed only on a node: any executable stands for it here.
        (tmp_path / source.name).write_text(text.replace("/opt/tba/bin/tba", "/bin/true"))
    if "@" in unit:
        template = f"{unit.split('@')[0]}@.service"
        (tmp_path / unit).write_text((tmp_path / template).read_text())
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_no_role_is_restarted_after_a_configuration_error():
    services = sorted(UNITS.glob("*.service"))
    assert len(services) == 3
    for service in services:
        assert "RestartPreventExitStatus=78 2" in service.read_text(), service


def test_the_watchdog_of_searchers_waits_longer_than_a_searcher_waits_for_its_engine():
    seconds = {
        unit.name: int(re.findall(r"^WatchdogSec=(\d+)$", unit.read_text(), re.MULTILINE)[0])
        for unit in UNITS.glob("*.service")
    }
    assert len(seconds) == 3
    assert seconds["tba-search@.service"] > WARMUP_TIMES * SearchSection().step_seconds


@pytest.mark.parametrize("unit", ["tba-search@.service", "tba-train@.service"])
def test_the_weights_directory_is_shared_by_all_units(unit):
    settings = dict(
        line.split("=", 1) for line in (UNITS / unit).read_text().splitlines() if "=" in line and line[0] != "#"
    )
    assert (settings["User"], settings["StateDirectory"]) == ("tba", "tba")
    # Each of these would hide /dev/shm or the state directory, give them another owner, or delete files there.
    hiding = {"DynamicUser", "RemoveIPC", "PrivateIPC", "PrivateUsers", "TemporaryFileSystem", "InaccessiblePaths"}
    assert not hiding & settings.keys()
