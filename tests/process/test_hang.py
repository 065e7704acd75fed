"""An engine that hangs in a step, in a run of real processes."""

import os

import pytest

from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.whole_run import PROMPTS, log_of, small_sections, starts_of

# Of each searcher's first process, the engine hangs in its 60th step, and the processes that follow do not. The second
# searcher keeps the interpreter's lock meanwhile.
HANG = """
import os, sys
if "search" in sys.orig_argv and "--index" in sys.orig_argv:
    import ctypes, importlib.abc, threading
    mark = os.environ["HUNG_ONCE"] + sys.orig_argv[-1]

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "tba.searcher.loop":
                return None
            sys.meta_path.remove(self)
            from tba.searcher.engines.transformers_engine import TransformersEngine
            step, steps = TransformersEngine.step, []
            def hanging_step(self):
                steps.append(1)
                if len(steps) == 60 and not os.path.exists(mark):
                    open(mark, "w").close()
                    if mark.endswith("1"):
                        ctypes.PyDLL(None).sleep(600)
                    threading.Event().wait()
                return step(self)
            TransformersEngine.step = hanging_step

    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def hang_once(tmp_path, monkeypatch):
    """Make an engine of each searcher hang once."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HUNG_ONCE", str(tmp_path / "hung"))


def test_a_searcher_whose_engine_hangs_is_restarted_and_its_prompts_are_answered(
    make_config, start_tba, hang_once, tmp_path
):
    # No lease expires within this test: the restarted searchers return those of the ones that hung.
    search, train = {"cpu_searchers": 2, "step_seconds": 2.0}, {"steps": 100_000}
    run = make_config(**small_sections(search=search, buffer={"lease_seconds": 600.0}, train=train))
    launcher = start_tba("run", run.file)
    wait_until(lambda: run.steps_trained() >= 1)
    wait_until(lambda: starts_of(run, "search") == 4)
    answered = "SELECT COUNT(*) FROM visits WHERE epoch = 0 AND done_at IS NOT NULL"
    wait_until(lambda: run.query(answered) == [(PROMPTS,)])
    launcher.terminate()
    assert launcher.wait(60) == 0
    output = log_of(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("hung*")) == ["hung0", "hung1"]
    assert output.count("this process exits exit_code=75 limit=search.step_seconds") == 1
    assert output.count("Timeout (0:00:0") == 1
    assert output.count("in hanging_step") >= 2
