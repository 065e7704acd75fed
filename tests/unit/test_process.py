"""How a process behaves towards the system."""

import subprocess
import sys

import pytest

# Each block is larger than the one before: what glibc learns from the first is of no use for the next.
FAULTS = """
import resource, sys
from tba.common.process import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for mib in range(8, 24):
    block = bytes([1]) * (mib << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is asked to keep the memory")
def test_memory_that_is_kept_is_not_asked_for_again():
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)

    pages = sum(range(8, 24)) * 256
    assert faults("plain") > 0.9 * pages
    assert faults("keep") < 0.2 * pages
