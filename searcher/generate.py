"""`tba generate`: answer a prompt, or hold a conversation, with any model directory."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tba.common.config import Config
from tba.common.errors import TaskError, UsageError, quantity
from tba.common.rendering import Message, PromptRenderer
from tba.common.weights.pretrained import load_tokenizer
from tba.common.wire.trajectory import STOP_EOS
from tba.searcher.build import make_engine, served
from tba.searcher.engines.engine import Engine, Generation, Requests, SamplingSettings
from tba.searcher.engines.stopping import read_stopping
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, has_environment

_WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Generated:
    """One response. `logprob` is the sum over its tokens in nats; not `finished` if it was cut off by its length."""

    text: str
    tokens: int
    logprob: float
    finished: bool


class Generator:
    """One model and its engine. Raises ConfigError if it does not load, UsageError for `chat` without a template."""

    def __init__(self, config: Config, directory: Path, *, device: str, chat: bool) -> None:
        # Adapters are merged in the directory.
        task = config.task.model_copy(update={"template": "chat"}) if chat else config.task
        own = served(config, directory).model_copy(update={"task": task})
        tokenizer = load_tokenizer(directory)
        if chat and not tokenizer.chat_template:
            raise UsageError("the tokenizer of this model has no chat template: leave out --chat")
        self._renderer = PromptRenderer(tokenizer, task)
        self._stopping = read_stopping(own, self._renderer.tokenizer)
        self._engine: Engine = make_engine(own, self._stopping, device=device, name="generate")
        self._requests = Requests(self._engine)

    def close(self) -> None:
        self._engine.close()

    def generate(self, prompt: Prompt, sampling: SamplingSettings, samples: int = 1) -> list[Generated]:
        """Return `samples` responses as they end. Raises TaskError or EngineError for a prompt that cannot be used."""
        try:
            ids = np.asarray(self._renderer.ids(prompt), np.int32)
        except ValueError as error:
            raise TaskError(f"the prompt cannot be rendered: {error}") from error
        done: list[Generation] = []
        for _ in range(samples):
            self._requests.ask(ids, sampling, done.append, first=False)
        while self._engine.in_flight:
            self._requests.step()
        return [self._read(generation) for generation in done]

    def _read(self, generation: Generation) -> Generated:
        tokens = generation.response_ids.tolist()
        logprob = float(generation.logprobs.astype(np.float64).sum())
        return Generated(self._stopping.scored_text(tokens), len(tokens), logprob, generation.stop_reason == STOP_EOS)

    def play(
        self, rewards: Rewards, prompt: Prompt, sampling: SamplingSettings, limits: Limits
    ) -> Iterator[tuple[str, str]]:
        """Yield the turns of an episode as they happen: see `play_one`."""
        parts = (self._requests.ask, rewards, self._renderer, self._stopping, limits)
        episodes = Episodes(*parts, lambda: self._engine.weights_version)
        episode, shown = episodes.begin(0, prompt, sampling), 0
        while not episodes.ended():
            for scored in rewards.wait(_WAIT_SECONDS) if rewards.waiting else ():
                episodes.told(scored)
            self._requests.step()
            yield from episode.said[shown:]
            shown = len(episode.said)
        ended = f"{episode.stop_reason} after {quantity(len(episode.turns), 'turn')}"
        yield "end", f"{ended}: {episode.error or f'reward {episode.reward:g}'}"


def converse(generator: Generator, lines: Iterator[str], sampling: SamplingSettings) -> Iterator[Generated]:
    """Yield the reply to each line, given all lines and replies before it. Empty lines are skipped."""
    messages: list[Message] = []
    for line in lines:
        if not (said := line.strip()):
            continue
        messages.append(("user", said))
        (reply,) = generator.generate(Prompt("chat", messages=messages), sampling)
        messages.append(("assistant", reply.text))
        yield reply


def play_one(
    config: Config, directory: Path, key: str, sampling: SamplingSettings, *, device: str
) -> Iterator[tuple[str, str]]:
    """Play the episode of the task's prompt with this key; the first held-out prompt without one.

    Yields (who, text): the prompt, each reply and what the environment answered, and at last why the episode ended.
    Raises TaskError if the task has no such prompt, or no environment for it.
    """
    task = load_task(config.task)
    prompts = {prompt.key: prompt for prompt in (*task.held_out(), *task.prompts())}
    prompt = prompts.get(key) if key else next(iter(prompts.values()), None)
    if prompt is None:
        raise TaskError(f"task {task.name} has no prompt {key!r}: its keys are such as {', '.join([*prompts][:3])}")
    if not has_environment(task, prompt):
        raise TaskError(f"task {task.name} has no environment for this prompt: leave out --play")
    # Before the engine, as `WorkerPool` says.
    with (
        closing(Rewards(task, config.task)) as rewards,
        closing(Generator(config, directory, device=device, chat=False)) as generator,
    ):
        limits = replace(Limits.of(config), tokens=sampling.max_tokens)
        yield from generator.play(rewards, prompt, sampling, limits)
