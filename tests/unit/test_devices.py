"""Lists of GPUs."""

import pytest

from tba.common.devices import choose_gpus
from tba.common.errors import UsageError

EIGHT = [str(n) for n in range(8)]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [("0-6", EIGHT[:7]), ("7", ["7"]), ("0,2,4", ["0", "2", "4"]), ("0-1,7", ["0", "1", "7"]), ("all", EIGHT)],
)
def test_a_list_of_gpus_is_understood(wanted, chosen):
    assert choose_gpus(wanted, EIGHT) == chosen


def test_a_uuid_is_passed_on():
    assert choose_gpus("GPU-8f3a", EIGHT) == ["GPU-8f3a"]


@pytest.mark.parametrize("wanted", ["", "a", "3-1", "0;1", "-1", "1-"])
def test_a_malformed_list_is_refused(wanted):
    with pytest.raises(UsageError, match="is no list of GPUs"):
        choose_gpus(wanted, EIGHT)


def test_a_missing_gpu_is_named_with_those_that_are_there():
    with pytest.raises(UsageError, match="GPU 9 was asked for .*; this machine has 0, 1"):
        choose_gpus("0,9", ["0", "1"])


def test_a_gpu_that_stands_twice_is_named():
    with pytest.raises(UsageError, match="GPU 3 stands twice"):
        choose_gpus("0-3,3", EIGHT)


def test_a_machine_without_gpus_says_so():
    with pytest.raises(UsageError, match="shows no GPU: use --cpu"):
        choose_gpus("0", [])
