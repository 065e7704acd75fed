"""An engine that hangs in a step, in a run of real processes, and the end of the launcher."""

import os

import psutil
import pytest

from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.whole_run import PROMPTS, log_of, small_sections, starts_of

# The engine hangs in the 20th step of the first two processes of the searcher, of which loading takes 16. The second
# keeps the interpreter's lock meanwhile.
HANG = """
import os, sys
if "search" in sys.orig_argv and "--index" in sys.orig_argv:
    import ctypes, importlib.abc, threading
    marks = os.environ["HUNG"]

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "tba.searcher.loop":
                return None
            sys.meta_path.remove(self)
            from tba.searcher.engines.transformers_engine import TransformersEngine
            step, steps = TransformersEngine.step, []
            def hanging_step(self):
                steps.append(1)
                hung = len(os.listdir(marks))
                if len(steps) == 20 and hung < 2:
                    open(f"{marks}/{hung}", "w").close()
                    if hung == 1:
                        ctypes.PyDLL(None).sleep(600)
                    threading.Event().wait()
                return step(self)
            TransformersEngine.step = hanging_step

    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def hang_twice(tmp_path, monkeypatch):
    """Make the engine of a searcher hang, and that of its next process. Returns a folder with a file for each."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "hung").mkdir()
    monkeypatch.setenv("HUNG", str(tmp_path / "hung"))
    return tmp_path / "hung"


def test_a_searcher_whose_engine_hangs_is_restarted_and_a_killed_launcher_leaves_no_child(
    make_config, start_tba, hang_twice, tmp_path
):
    # No lease expires within this test: the restarted searcher returns those of the one that hung. The trainer waits
    # for new data meanwhile.
    search, buffer = {"step_seconds": 2.0}, {"lease_seconds": 600.0, "max_staleness": 2}
    run = make_config(**small_sections(search=search, buffer=buffer, train={"steps": 100_000}))
    launcher = start_tba("run", run.file)
    wait_until(lambda: run.steps_trained() >= 1)
    wait_until(lambda: starts_of(run, "search") == 3)
    answered = "SELECT COUNT(*) FROM visits WHERE epoch = 0 AND done_at IS NOT NULL"
    wait_until(lambda: run.query(answered) == [(PROMPTS,)])
    roles = psutil.Process(launcher.pid).children()
    assert len(roles) == 4, "three roles and the guard"
    # These include the processes that the roles have started.
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    output = log_of(tmp_path)
    assert len(list(hang_twice.iterdir())) == 2
    assert output.count("this process exits exit_code=75 limit=search.step_seconds") == 1
    assert output.count("Timeout (0:00:0") == 1
    assert output.count("in hanging_step") >= 2
