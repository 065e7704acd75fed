"""The files for schedulers: each can be read, and so can the commands in it."""

import subprocess

import pytest
import yaml

from tba.tests.conftest import ROOT

SCHEDULERS = ROOT / "deploy" / "schedulers"


def scripts(name: str) -> list[str]:
    """Return the shell commands in a file."""
    text = (SCHEDULERS / name).read_text()
    if name.endswith(".sh"):
        return [text]
    read = yaml.safe_load(text)
    if "items" in read:
        pods = [item["spec"]["template"]["spec"] for item in read["items"] if item["kind"] == "StatefulSet"]
        return [pod["containers"][0]["args"][0] for pod in pods] + [pods[0]["initContainers"][0]["command"][2]]
    return ["\n".join(read["commands"])] if "commands" in read else [read["setup"], read["run"]]


@pytest.mark.parametrize("name", sorted(path.name for path in SCHEDULERS.iterdir()))
def test_the_commands_of_a_scheduler_are_valid_and_its_file_says_what_was_run(name):
    assert "\n# Run: " in (SCHEDULERS / name).read_text()
    for script in scripts(name):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
