"""Whole episodes on both engines: each token has the log-probability and the version of the weights that made it."""

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tba.common.config import Config
from tba.common.rendering import PromptRenderer
from tba.common.wire.messages import Visit
from tba.searcher.build import LoadedTask
from tba.searcher.engines.stopping import Stopping
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.pipeline import Exploration, GenerationStage, Pipeline, ScoringStage
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks.games import GuessTask
from tba.tests.vllm.conftest import VOCABULARY
from tba.tests.vllm.test_in_flight import mixed_logprobs

pytest.importorskip("vllm", reason="vLLM is not installed")

TURNS, TOKENS = 4, 5


def numbers() -> Any:
    """Return a tokenizer whose tokens are numbers, so that every reply of a random model is a guess."""
    bare = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare)


def play(engine: Any, on_step: Any) -> list[Any]:
    """Return the rows of twelve games; `on_step` is called before each step of the engine, with its number."""
    search = {"engine": "vllm", "max_turns": TURNS, "turn_tokens": TOKENS, "max_tokens": 100}
    config = Config.model_validate({"task": {"name": "guess", "reward_workers": 0}, "search": search})
    tokenizer, groups = numbers(), list[Any]()
    task: Any = GuessTask(prompts=3)
    stopping, renderer = Stopping(tokenizer, (), ()), PromptRenderer(tokenizer, config.task)
    rewards = Rewards(task, config.task)
    settings = Exploration(config.search, run_seed=0, searcher="s").settings
    generation = GenerationStage(engine, LoadedTask(task, renderer, stopping), task.prompts(), settings, samples=4)
    episodes = Episodes(
        generation.ask, rewards, renderer, stopping, Limits.of(config), lambda: int(engine.weights_version)
    )
    delivery = SimpleNamespace(leases=set(), submit=lambda rows, lease, closes: groups.append(rows))
    pipeline = Pipeline(generation, ScoringStage(rewards, stopping, "score", episodes), cast(Any, delivery))
    pipeline.submit(Visit(lease=n + 1, epoch=0, prompt_key=one.key) for n, one in enumerate(task.prompts()))
    for step in count():
        if len(groups) == len(task.prompts()):
            break
        on_step(step)
        pipeline.step(generate=True, wait_seconds=0.1)
    rewards.close()
    return [row for group in groups for row in group]


@pytest.mark.parametrize("swap_at", [None, 8])
def test_each_token_of_an_episode_has_the_log_probability_and_the_version_of_its_weights(
    lab, engine, old, new, swap_at
):
    versions = [lab.serve(engine, old)]
    rows = play(engine, lambda step: versions.append(lab.serve(engine, new)) if step == swap_at else None)
    seen = set()
    for row in rows:
        assert (row.error, len(row.turns)) == (None, TURNS)
        ids, by_token = [*row.prompt_ids.tolist(), *row.response_ids.tolist()], np.repeat(*row.version_runs.T)
        for turn in row.turns:
            start, end = turn["start"], turn["start"] + turn["tokens"]
            context, sampled = ids[: len(row.prompt_ids) + start], ids[len(row.prompt_ids) :][start:end]
            of_old = int((by_token[start:end] == versions[0]).sum())
            assert by_token[start:end].tolist() == [versions[0]] * of_old + versions[-1:] * (TOKENS - of_old)
            if of_old in (0, TOKENS):
                expected = lab.response_logprobs(old if of_old else new, context, sampled)
            else:
                expected = mixed_logprobs(lab, old, new, context, sampled, of_old)
            np.testing.assert_allclose(row.logprobs[start:end], expected, atol=1e-4)
            seen.add(of_old)
    # Turns before the swap, through it and after it; each row has tokens of both versions.
    assert seen == ({TOKENS} if swap_at is None else {0, TOKENS, *seen})
    assert swap_at is None or len(seen) > 2
    assert all(len({*row.version_runs[:, 0]}) == len(versions) for row in rows)
