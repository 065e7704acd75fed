"""The systemd units, verified by systemd."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tba.common.config.search import SearchSection
from tba.common.system.watchdog import WARMUP_TIMES

UNITS = Path(__file__).parents[3] / "deploy/systemd"
ANALYZE = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@ANALYZE
@pytest.mark.parametrize("folder", [".", "user"])
@pytest.mark.parametrize("unit", ["tba-buffer.service", "tba-search@0-6.service", "tba-train@7.service", "tba.target"])
def test_systemd_accepts_a_unit(unit, folder, tmp_path):
    for source in (UNITS / folder).glob("tba*"):
        text = source.read_text()
        # The program is installed only on a node: any executable stands for it here.
        (tmp_path / source.name).write_text(
            text.replace("/opt/tba/bin/tba", "/bin/true").replace("%h/tba/bin/tba", "/bin/true")
        )
    if "@" in unit:
        template = f"{unit.split('@')[0]}@.service"
        (tmp_path / unit).write_text((tmp_path / template).read_text())
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


@ANALYZE
@pytest.mark.parametrize(
    ("unit", "most"), [("tba-buffer.service", 4.5), ("tba-search@.service", 6), ("tba-train@.service", 6)]
)
def test_a_unit_exposes_little_by_the_measure_of_systemd(unit, most, tmp_path):
    file = tmp_path / unit.replace("@", "@7")
    file.write_text((UNITS / unit).read_text())
    command = ["systemd-analyze", "security", "--offline=true", str(file)]
    result = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized option" in result.stderr:
        pytest.skip("systemd-analyze is older than 250")
    exposures = re.findall(r"Overall exposure level for \S+: ([\d.]+)", result.stdout)
    assert [exposure for exposure in exposures if float(exposure) <= most], result.stdout + result.stderr


def settings_of(unit):
    """The settings of a unit: those that are repeated keep their last value."""
    return dict(
        line.split("=", 1) for line in (UNITS / unit).read_text().splitlines() if "=" in line and line[0] != "#"
    )


@pytest.mark.parametrize("unit", ["tba-search@.service", "tba-train@.service"])
def test_nothing_in_a_unit_closes_the_devices_of_a_gpu_forbids_compiled_kernels_or_hides_the_weights(unit):
    settings = settings_of(unit)
    # ProtectClock= admits a device by name, so that all others are closed: systemd.exec(5).
    closing = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"}
    # Each of these would hide /dev/shm or the state directory, give them another owner, or delete files there.
    hiding = {"DynamicUser", "RemoveIPC", "PrivateIPC", "PrivateUsers", "TemporaryFileSystem", "InaccessiblePaths"}
    assert not (closing | hiding) & settings.keys()
    assert (settings["User"], settings["StateDirectory"]) == ("tba", "tba")


@pytest.mark.parametrize("unit", ["tba-buffer.service", "tba-search@.service", "tba-train@.service"])
def test_a_users_unit_differs_from_that_of_the_system_only_in_its_places(unit):
    system, users = settings_of(unit), settings_of(f"user/{unit}")
    different = {key for key, value in users.items() if system.get(key) != value}
    assert different <= {"Environment", "EnvironmentFile", "ExecStart", "After", "KillMode", "LimitCORE"}


def test_no_role_is_restarted_after_a_configuration_error_nor_ended_while_it_waits_for_its_engine():
    services = sorted(UNITS.rglob("*.service"))
    assert len(services) == 6
    for service in services:
        assert "RestartPreventExitStatus=78 2" in service.read_text(), service
    seconds = {unit.name: int(settings_of(unit.name)["WatchdogSec"]) for unit in UNITS.glob("*.service")}
    assert seconds["tba-search@.service"] > WARMUP_TIMES * SearchSection().step_seconds
