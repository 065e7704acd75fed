"""Lists of GPUs and the output of nvidia-smi, which a small program on PATH replaces."""

import shlex

import pytest

from tba.common.config import Config, TrainSection
from tba.common.errors import DeviceBusy, UsageError
from tba.common.system.devices import (
    Gpu,
    check_free,
    choose_gpus,
    group_gpus,
    label,
    list_gpus,
    searcher_gpus,
    shared_gpus,
)
from tba.deploy.fleet import searcher_groups

EIGHT = [Gpu(str(n), uuid=f"GPU-{n}aaa-{n}", total_mib=80_000) for n in range(8)]
NAMES = [str(n) for n in range(8)]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("0-6", NAMES[:7]), ("7", ["7"]), ("0,2,4", ["0", "2", "4"]), ("0-1,7", ["0", "1", "7"]), ("all", NAMES),
        *((uuid, [uuid]) for uuid in ("GPU-3aaa-3", "GPU-3a", "MIG-1")),
    ],
)  # fmt: skip
def test_a_list_of_gpus_is_parsed_and_a_uuid_passed_through(wanted, chosen):
    assert choose_gpus(wanted, EIGHT, "train.gpu") == chosen


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        *((malformed, "is not a list of GPUs") for malformed in ("", "a", "3-1", "0;1", "-1", "1-")),
        *((f"0,{name}", f"GPU {name} .* does not exist; GPUs here: 0 .GPU-0aaa-0., 1") for name in ("9", "GPU-9")),
        ("GPU-", "several UUIDs"),
        *((twice, "GPU 3 is named twice") for twice in ("0-3,3", "3,GPU-3aaa")),
    ],
)
def test_a_list_of_what_is_no_gpu_is_refused(wanted, words):
    with pytest.raises(UsageError, match=words):
        choose_gpus(wanted, EIGHT, "train.gpu")
    # Without any, the error names setting and option.
    absent = (
        rf'^train.gpu asks for GPU {wanted}, but this machine shows no GPU .*: pass --cpu, or set train.gpu = "cpu"'
    )
    with pytest.raises(UsageError, match=absent):
        choose_gpus(wanted, [], "train.gpu", "--cpu")


def test_gpus_are_cut_into_consecutive_groups():
    assert group_gpus(["0", "1", "4", "5"], 2) == [["0", "1"], ["4", "5"]]
    assert [label(group) for group in (["3"], ["0", "1"], ["GPU-8f"])] == ["gpu3", "gpu0-1", "GPU-8f"]
    with pytest.raises(UsageError, match=r"3 GPUs \(0, 1, 2\) cannot be cut into groups of .* = 2"):
        group_gpus(["0", "1", "2"], 2)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that puts a fake nvidia-smi on PATH, which answers both queries or fails."""

    def install(gpus: str = "", apps: str = "", failure: str = "") -> None:
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "apps").write_text(apps)
        fails = f"echo '{failure}'; exit 9" if failure else ""
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\n{fails}\ncd {shlex.quote(str(tmp_path))}\n"
            'case "$1" in --query-gpu=*) cat gpus;; *) cat apps;; esac\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


TWO = "0, GPU-aa, 81559, 4\n1, GPU-bb, 81559, 70000\n"


def test_the_error_of_a_busy_gpu_names_the_process_on_it(nvidia_smi):
    # A name may have a comma.
    nvidia_smi(TWO, "GPU-bb, 4711, 69990, /opt/a, b/serve\n")
    gpus = list_gpus()
    assert [gpu.index for gpu in gpus] == ["0", "1"]
    check_free(["0"], gpus, utilization=0.9)
    check_free(["1"], gpus, utilization=0.1)
    with pytest.raises(DeviceBusy, match=r"GPU 1 is busy: serve \(pid 4711, 69990 MiB\).*needs 73403 MiB; end that"):
        check_free(["0", "1"], gpus, utilization=0.9)


def test_gpus_that_a_scheduler_hides_are_not_listed_and_a_failing_driver_has_its_message(nvidia_smi, monkeypatch):
    nvidia_smi(TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert [gpu.index for gpu in list_gpus()] == ["1"]
    with pytest.raises(UsageError, match="GPU 0 .* does not exist"):
        choose_gpus("0", list_gpus(), "train.gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list_gpus() == []
    nvidia_smi(failure="NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.")
    with pytest.raises(UsageError, match="no GPU can be used: NVIDIA-SMI has failed because"):
        list_gpus()


def test_all_searchers_of_tba_run_leave_out_the_gpus_of_the_trainer(nvidia_smi):
    nvidia_smi("".join(f"{index}, GPU-{index * 11:02}, 81559, 4\n" for index in range(4)))
    everywhere = Config.model_validate({"task": {"train": "t"}})
    assert searcher_groups(everywhere) == [["0"], ["1"], ["2"], ["3"]]
    for trainer, left in [("0", "123"), ("1-2", "03"), ("GPU-33,0", "12"), ("cpu", "0123"), ("all", "0123")]:
        config = everywhere.model_copy(update={"train": TrainSection(gpu=trainer)})
        assert searcher_groups(config, with_trainer=True) == [[index] for index in left], trainer
    one = [Gpu("0", "GPU-00")]
    assert searcher_gpus("all", "0", one) == "all"
    assert shared_gpus("all", "GPU-00", one) == shared_gpus("0", "GPU-00", one) == ["0"]
    assert searcher_gpus("0-3", "0", one) == "0-3"
