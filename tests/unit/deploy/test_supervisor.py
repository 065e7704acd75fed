"""Order and arguments of the children on one GPU. A line of code stands for each child's program."""

import pytest

from tba.common.config import Config, LaunchSection
from tba.common.system.devices import Gpu
from tba.deploy.child import Child
from tba.deploy.launcher import children_of
from tba.deploy.supervisor import Supervisor
from tba.tests.helpers.checks import wait_until

# Runs first in the process of a child, whose arguments follow `-m tba`.
PROGRAM = """
import os, signal, socket, sys
def tell(text):
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
arguments = sys.orig_argv[3:]
{code}
os._exit(1)
"""


@pytest.fixture
def child(tmp_path):
    """Return a function that makes a child which runs some code, or else fails."""

    def make(name: str, code: str, **fields) -> Child:
        site = tmp_path / name / "sitecustomize.py"
        site.parent.mkdir()
        site.write_text(PROGRAM.format(code=code))
        return Child(
            name, name, ["x"], tmp_path / f"{name}.log", environment={"PYTHONPATH": str(site.parent)}, **fields
        )

    return make


READY = 'tell("READY=1"); signal.pause()'


@pytest.fixture(autouse=True)
def restarts_do_not_wait(monkeypatch):
    monkeypatch.setattr("tba.deploy.supervisor.RESTART_DELAY_SECONDS", 0)


@pytest.mark.parametrize(("code", "starts"), [(READY, 1), ("", 2)], ids=["ready", "given up"])
def test_a_trainer_starts_when_the_engine_on_its_gpu_is_ready_or_has_given_up(child, code, starts):
    engine = child("engine", code)
    trainer = child("trainer", READY, behind=[engine])
    with Supervisor([engine, trainer], LaunchSection(max_restarts=1)) as supervisor:
        wait_until(lambda: supervisor.poll() or trainer.starts)
        assert engine.starts == starts
        assert engine.ready == (code == READY)
        assert supervisor.broken(engine) == (code != READY)
        if not engine.ready:
            return
        # One that failed waits for an engine that starts again.
        wait_until(lambda: supervisor.poll() or trainer.ready)
        engine.process.kill()
        trainer.process.kill()
        wait_until(lambda: supervisor.poll() or trainer.starts == 2)
        assert (engine.starts, engine.ready) == (2, True)


def test_an_engine_starts_again_with_the_size_of_its_kv_cache_and_measures_after_a_start_that_failed(child, tmp_path):
    # The first start reports a size and fails; the second fails before it does.
    code = 'print(arguments, flush=True)\nif len(arguments) == 1: tell("X_KV_CACHE_GIB=11.5")'
    engine = child("engine", code)
    with Supervisor([engine], LaunchSection()) as supervisor:
        wait_until(lambda: supervisor.poll() or engine.failures == 3)
    given = (tmp_path / "engine.log").read_text().splitlines()
    assert given == ["['x']", "['x', '--set=search.kv_cache_gib=11.5']", "['x']"]


@pytest.mark.parametrize(
    ("search", "evaluator", "trainer", "expected"),
    [
        ("0", "", "0", {"trainer": ["search-0"]}),
        ("0-1", "", "GPU-bb,2", {"trainer": ["search-1"]}),
        ("0-1", "1", "1", {"evaluator": ["search-1"], "trainer": ["search-1", "evaluator"]}),
        ("0-1", "2", "3", {}),
        ("cpu", "", "cpu", {}),
    ],
)
def test_the_trainer_of_a_run_is_behind_the_engines_on_its_gpus(search, evaluator, trainer, expected):
    sections = {"search": {"gpus": search, "gpu_memory_utilization": 0.2}, "train": {"gpu": trainer}}
    present = [Gpu(str(n), f"GPU-{letter * 2}", 81559) for n, letter in enumerate("abcd")]
    config = Config.model_validate(sections | {"eval": {"gpu": evaluator}})
    roles = children_of(config, [], resume=False, present=present)
    behind = {child.name: [engine.name for engine in child.behind] for child in roles.all if child.behind}
    assert behind == expected
