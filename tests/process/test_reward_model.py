"""The reward model in its own process: it scores in batches, and its end is a row's error and nothing more."""

import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from tba.common.config import Config
from tba.common.errors import EXIT_FAILED, WorkerLost
from tba.searcher.model_rewards import ModelScorer
from tba.searcher.reward_model import RewardModel
from tba.searcher.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.tests.classifiers import make_classifier

WEIGHT = 0.25
# Runs in each Python that is started: a worker meets its fate when it opens the configuration of the model.
MEDDLER = """
import os, re, resource, sys, time

def at_open(event, arguments):
    if event == "open" and str(arguments[0]).endswith("classifier/config.json"):
        open(os.environ["MEDDLER"] + "/loading", "w").close()
        {fate}

if "tba.searcher.reward_model_worker" in sys.orig_argv:
    sys.addaudithook(at_open)
"""
FATES = {
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
        made.append(
            Rewards(task, config.task.model_copy(update={"reward_workers": 1}), ModelScorer(config.reward_model, "cpu"))
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def prompts():
    return load_task(Config().task).prompts()


def submit(rewards, texts, first=0):
    for n, text in enumerate(texts, first):
        rewards.submit(n, prompts()[n], text, True)


def collect(rewards):
    answers = {}
    while rewards.waiting:
        answers |= {scored.ticket: scored for scored in rewards.wait(1.0)}
    return [answers[ticket] for ticket in sorted(answers)]


def send_all(rewards, texts, first=0):
    """Submit, and return when the worker has been sent all of it."""
    submit(rewards, texts, first)
    while not rewards._model._sent:
        rewards.wait(0.05)


def test_a_reward_is_the_tasks_own_plus_the_weighted_logit_of_the_model(rewards, classifier):
    texts = [str(n) * (1 + n % 7) for n in range(100)]
    rewards = rewards(batch_tokens=64)
    submit(rewards, texts)
    model, task = RewardModel(classifier, rewards._model.config, "cpu"), load_task(Config().task)
    for scored, prompt, text in zip(collect(rewards), prompts(), texts, strict=False):
        (logit,) = model.score([model.encode(prompt.text, text)], lambda *_: None)
        own = task.score(prompt, text, True)
        assert scored.error is None
        assert scored.reward.total == pytest.approx(own.total + WEIGHT * logit, abs=1e-5)
        assert scored.reward.parts == pytest.approx({**own.parts, "reward_model": logit}, abs=1e-5)


def test_a_model_that_hangs_or_is_killed_fails_what_it_was_at_and_scores_again_after_a_pause(rewards):
    rewards = rewards(time_limit_seconds=2.0)
    os.kill(rewards._model._worker.pid, signal.SIGSTOP)
    send_all(rewards, ["1", "2"])
    submit(rewards, ["3"], first=2)
    assert [scored.error for scored in collect(rewards)][:2] == ["reward: model: timed out after 2 s"] * 2
    assert rewards.timeouts == 1
    submit(rewards, ["4"], first=3)
    assert collect(rewards)[0].error in (None, "reward: model: no worker: timed out after 2 s")
    while not rewards._model._ready:
        rewards.wait(0.05)
    os.kill(rewards._model._worker.pid, signal.SIGSTOP)
    send_all(rewards, ["5"], first=4)
    os.kill(rewards._model._worker.pid, signal.SIGKILL)
    assert collect(rewards)[0].error == "reward: model: the worker was killed by SIGKILL"
    while not rewards._model._ready:
        rewards.wait(0.05)
    submit(rewards, ["6"], first=5)
    assert collect(rewards)[0].error is None


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux's")
def test_a_pair_that_wants_more_memory_than_there_is_fails_and_the_others_do_not(rewards, tmp_path):
    wide = make_classifier(
        tmp_path / "wide", num_hidden_layers=1, intermediate_size=1 << 14, max_position_embeddings=1 << 14
    )
    rewards = rewards(path=str(wide))
    submit(rewards, ["1"])
    assert collect(rewards)[0].error is None
    pid = rewards._model._worker.pid
    (data_kib,) = re.findall(r"VmData:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    limit = (int(data_kib) << 10) + (200 << 20)
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    submit(rewards, ["2", "3" * 8_000, "4"], first=1)
    errors = [scored.error for scored in collect(rewards)]
    assert errors == [None, "reward: model: out of memory on cpu with 8006 tokens", None]
    assert rewards._model._worker.pid == pid


@pytest.fixture
def meddle(monkeypatch, tmp_path):
    """Has workers meet a fate while they load a model; returns the file that is there from then on."""

    def begin(fate):
        (tmp_path / "sitecustomize.py").write_text(MEDDLER.format(fate=FATES[fate]))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("MEDDLER", str(tmp_path))
        return tmp_path / "loading"

    return begin


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="what a limit counts is Linux's")
@pytest.mark.parametrize(
    ("fate", "sentence"),
    [
        ("short", "out of memory while the reward model in .*classifier was loaded"),
        ("killed", "the worker was killed by SIGKILL"),
    ],
)
def test_a_model_that_lacks_memory_while_it_loads_is_not_a_wrong_configuration(meddle, tmp_path, fate, sentence):
    meddle(fate)
    path = make_classifier(tmp_path / "classifier", num_hidden_layers=1, intermediate_size=1 << 19)
    config = Config.model_validate({"reward_model": {"path": str(path)}})
    with pytest.raises(WorkerLost, match=sentence) as raised:
        ModelScorer(config.reward_model, "cpu")
    assert raised.value.exit_code == EXIT_FAILED


def test_a_searcher_that_is_asked_to_stop_while_its_reward_model_loads_leaves_at_once(
    meddle, classifier, make_config, start_tba, example_model, tmp_path, monkeypatch
):
    loading = meddle("hangs")
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    (tmp_path / "classifier").symlink_to(classifier)
    run = make_config(
        model={"path": str(example_model), "dtype": "float32"},
        search={"engine": "transformers", "gpus": "cpu"},
        reward_model={"path": str(tmp_path / "classifier")},
    )
    searcher = start_tba("search", "--config", run.file)
    deadline = time.monotonic() + 120
    while not loading.exists():
        assert time.monotonic() < deadline, "it did not come to load the model"
        time.sleep(0.05)
    searcher.terminate()
    assert searcher.wait(30) == 0
    # By the way: no OpenMP thread of a searcher spins while it waits, which would starve those that do something.
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", (tmp_path / "tba0.log").read_text())
    assert set(spins) == {"0"}
