"""The reward model in its own process: it scores in batches, and when it dies, rows get an error."""

import functools
import json
import os
import re
import resource
import signal
from pathlib import Path

import pytest

from tba.common.config import Config
from tba.common.errors import EXIT_FAILED, WorkerLost
from tba.searcher.scoring.classifier import RewardModel
from tba.searcher.scoring.rewards import ModelScorer, Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Reward
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.classifiers import make_classifier
from tba.tests.helpers.whole_run import small_sections
from tba.tests.process.conftest import collect, submit

WEIGHT = 0.25
# Runs in every Python process that is started: a worker fails when it opens the configuration of the model.
SABOTEUR = """
import os, re, resource, sys, time

def at_open(event, arguments):
    if event == "open" and str(arguments[0]).endswith("classifier/config.json"):
        open(os.environ["SABOTEUR"] + "/loading", "w").close()
        {fault}

if "tba.searcher.scoring.classifier" in sys.orig_argv:
    sys.addaudithook(at_open)
"""
FAULTS = {
    "short": """data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (data + (64 << 20),) * 2)""",
    "killed": "os.kill(os.getpid(), 9)",
    "hangs": "time.sleep(3600)",
}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier"), max_position_embeddings=1 << 20)


@pytest.fixture
def rewards(classifier):
    """Rewards of the arithmetic task and the classifier; keyword arguments are keys of its section."""
    made = []

    def make(**keys):
        config = Config.model_validate({"reward_model": {"path": str(classifier), "weight": WEIGHT} | keys})
        task = load_task(config.task)
        model, workers = ModelScorer(config.reward_model, "cpu"), {"reward_workers": 1}
        made.append(Rewards(task, config.task.model_copy(update=workers), model, weight=WEIGHT))
        return made[-1]

    yield make
    for one in made:
        one.close()


@functools.cache
def prompts():
    """Return all prompts of the arithmetic task, which takes longer to make than a score."""
    return load_task(Config().task).prompts()


def ask(rewards, texts, first=0):
    submit(rewards, zip(prompts()[first:], texts, strict=False), first)


def worker_of(rewards):
    """The worker of the model; its pool replaces it, so it is looked up each time."""
    (worker,) = rewards._model.workers
    return worker


def send_all(rewards, texts, first=0):
    """Submit, and return when the worker has been sent all of it."""
    ask(rewards, texts, first)
    while not worker_of(rewards).items:
        rewards.wait(0.05)


def test_a_reward_is_the_sum_of_the_task_and_the_weighted_logit(rewards, classifier):
    texts = [str(n) * (1 + n % 7) for n in range(100)]
    rewards = rewards()
    ask(rewards, texts)
    model, task = RewardModel(classifier, rewards._model.config, "cpu"), load_task(Config().task)
    for scored, prompt, text in zip(collect(rewards), prompts(), texts, strict=False):
        (logit,) = model.score([model.encode(prompt.text, text)], lambda *_: None)
        assert isinstance(logit, float)
        own = task.score(prompt, text, True)
        assert isinstance(own, Reward)
        assert scored.error is None
        assert scored.reward.total == pytest.approx(own.total + WEIGHT * logit, abs=1e-5)
        assert scored.reward.parts == pytest.approx({**own.parts, "reward_model": logit}, abs=1e-5)


def test_a_model_that_hangs_or_is_killed_fails_one_response_and_scores_again_after_a_restart(rewards):
    rewards = rewards(time_limit_seconds=5.0)
    os.kill(worker_of(rewards).process.pid, signal.SIGSTOP)
    send_all(rewards, ["1", "2"])
    ask(rewards, ["3"], first=2)
    first, *others = [scored.error for scored in collect(rewards)]
    assert first == "reward: model: timed out after 5 s"
    # Scored by the next process, unless it takes too long to load.
    assert set(others) <= {None, "reward: model: no worker: timed out after 5 s"}
    assert rewards.timeouts == 1
    while not rewards._model.ready:
        rewards.wait(0.05)
    os.kill(worker_of(rewards).process.pid, signal.SIGSTOP)
    send_all(rewards, ["4"], first=3)
    os.kill(worker_of(rewards).process.pid, signal.SIGKILL)
    assert collect(rewards)[0].error == "reward: model: the worker was killed by SIGKILL"
    while not rewards._model.ready:
        rewards.wait(0.05)
    ask(rewards, ["5"], first=4)
    assert collect(rewards)[0].error is None


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux's")
def test_a_pair_that_needs_too_much_memory_fails_alone(rewards, tmp_path):
    wide = make_classifier(
        tmp_path / "wide", num_hidden_layers=1, intermediate_size=1 << 14, max_position_embeddings=1 << 14
    )
    rewards = rewards(path=str(wide))
    ask(rewards, ["1"])
    assert collect(rewards)[0].error is None
    pid = worker_of(rewards).process.pid
    (data_kib,) = re.findall(r"VmData:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    limit = (int(data_kib) << 10) + (200 << 20)
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    ask(rewards, ["2", "3" * 8_000, "4"], first=1)
    found = collect(rewards)
    assert [scored.error for scored in found] == [None, "reward: model: out of memory on cpu with 8006 tokens", None]
    assert [scored.error_kind for scored in found] == [None, "reward_model", None]
    assert worker_of(rewards).process.pid == pid


@pytest.fixture
def sabotage(monkeypatch, tmp_path):
    """Makes workers fail while they load a model; returns a file that exists from that moment."""

    def begin(fault):
        (tmp_path / "sitecustomize.py").write_text(SABOTEUR.format(fault=FAULTS[fault]))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("SABOTEUR", str(tmp_path))
        return tmp_path / "loading"

    return begin


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="what a limit counts is Linux's")
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("short", "out of memory while the reward model in .*classifier was loaded"),
        ("killed", "the worker was killed by SIGKILL"),
    ],
)
def test_a_lack_of_memory_while_the_model_loads_is_not_a_configuration_error(sabotage, tmp_path, fault, sentence):
    sabotage(fault)
    path = make_classifier(tmp_path / "classifier", num_hidden_layers=1, intermediate_size=1 << 19)
    config = Config.model_validate({"reward_model": {"path": str(path)}})
    with pytest.raises(WorkerLost, match=sentence) as raised:
        ModelScorer(config.reward_model, "cpu")
    assert raised.value.exit_code == EXIT_FAILED


def test_a_searcher_can_be_stopped_while_its_reward_model_loads(
    sabotage, classifier, make_config, start_tba, example_model, tmp_path, monkeypatch
):
    loading = sabotage("hangs")
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    (tmp_path / "classifier").symlink_to(classifier)
    run = make_config(
        model={"path": str(example_model), "dtype": "float32"},
        search={"engine": "transformers", "gpus": "cpu"},
        reward_model={"path": str(tmp_path / "classifier")},
    )
    searcher = start_tba("search", "--config", run.file)
    wait_until(loading.exists, what="it begins to load the model")
    searcher.terminate()
    assert searcher.wait(60) == 0
    # Also checked here: idle OpenMP threads of a searcher do not spin, which would starve the busy ones.
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", (tmp_path / "tba0.log").read_text())
    assert set(spins) == {"0"}


def test_a_run_trains_on_its_reward_model_in_a_phase_and_then_on_the_sparse_reward_of_the_task(
    classifier, make_config, tba
):
    sections = small_sections(
        task={"phases": [{"until": 2, "weights": {"reward_model": 0.5, "format": 0.1}}]},
        reward_model={"path": str(classifier), "weight": 0.0},
        buffer={"max_staleness": 1},
        train={"steps": 6},
    )
    run = make_config(**sections)
    assert tba("run", run.file, timeout=600).returncode == 0
    config = Config.model_validate(sections)
    model = RewardModel(classifier, config.reward_model, "cpu")
    correct_of_phase: dict[int | None, set[bool]] = {}
    for phase, version, reward, parts, prompt, text in run.query(
        "SELECT json_extract(r.sampling, '$.phase'), t.policy_version, t.reward, t.reward_parts, t.prompt_text, t.text"
        " FROM consumption c JOIN trajectories t ON t.id = c.trajectory JOIN trajectory_rows r ON r.id = t.id"
    ):
        (logit,) = model.score([model.encode(prompt, text)], lambda *_: None)
        assert isinstance(logit, float)
        own = json.loads(parts)
        assert own["reward_model"] == pytest.approx(logit, abs=1e-5)
        # A visit that the policy began before version 2 is of the phase, also if a later version answered.
        assert phase == 0 or version >= 2
        by_hand = own["correct"] if phase is None else 0.5 * logit + 0.1 * own["format"]
        assert reward == pytest.approx(by_hand, abs=1e-5)
        correct_of_phase.setdefault(phase, set()).add(own["correct"] == reward)
    # Both are trained on, and in the phase no reward is that of the task.
    assert correct_of_phase == {0: {False}, None: {True}}
