"""The task's prompts at the buffer: their registration, and the choice among them while the buffer is away."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tba.common.config import Config
from tba.common.errors import BufferUnavailable
from tba.common.rendering import PromptRenderer
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.searcher.tasks.task import Prompt, Task, fingerprint

_REGISTER_CHUNK = 10_000
# Characters of the texts in one message, which must fit a header also if each takes four bytes.
_REGISTER_CHARACTERS = 1 << 20
# Between two questions of a searcher whose prompts another one registers.
_WAIT_SECONDS = 0.2


def register_prompts(client: BufferClient, task: Task, renderer: PromptRenderer, stop: Callable[[], bool]) -> None:
    """Send keys, rendered texts and answers of the prompts that the buffer lacks, unless another searcher does.

    Raises Refused if it has others, or if another searcher renders them with other settings; BufferUnavailable after
    `stop()`.
    """
    prompts = task.prompts()
    digest = fingerprint(prompts, renderer.settings(prompts))

    def ask(offset: int, chunk: Sequence[tuple[str, str, str]]) -> messages.Registered:
        message = messages.RegisterPrompts(
            task=task.name,
            fingerprint=digest,
            total=len(prompts),
            offset=offset,
            keys=[key for key, _, _ in chunk],
            texts=[text for _, text, _ in chunk],
            answers=[answer for _, _, answer in chunk],
        )
        return client.call(message, messages.Registered, stop=stop)[0]

    registered = ask(0, [])
    while not registered.complete:
        if stop():
            raise BufferUnavailable("stopped before the prompts were registered")
        if registered.wait:
            time.sleep(_WAIT_SECONDS)
        chunk = [] if registered.wait else _chunk(prompts, registered.known, renderer)
        registered = ask(registered.known, chunk)


def _chunk(prompts: Sequence[Prompt], start: int, renderer: PromptRenderer) -> Sequence[tuple[str, str, str]]:
    """Return keys, texts and answers of as many prompts from a position on as fit one message, at least one."""
    chunk: list[tuple[str, str, str]] = []
    characters = 0
    for prompt in prompts[start : start + _REGISTER_CHUNK]:
        text = renderer.text(prompt)[: fields.MAX_PROMPT_TEXT]
        answer = prompt.answer[: fields.MAX_PROMPT_TEXT]
        characters += len(text) + len(answer)
        if chunk and characters > _REGISTER_CHARACTERS:
            break
        chunk.append((prompt.key, text, answer))
    return chunk


def outage_prompts(prompts: Sequence[Prompt], config: Config, sender: str) -> Iterator[messages.Visit]:
    """Yield prompts without a lease, for an outage of the buffer: an endless shuffle per searcher and start.

    They become rows without a visit, which are trained on. The buffer's epoch order is not affected, so no prompt is
    skipped. Where the configuration limits how far searchers may run ahead, only the buffer can keep that limit, and
    no prompt is generated without a lease.
    """
    if config.max_staleness is not None or config.samples_per_insert is not None:
        return
    rng = np.random.default_rng([config.run.seed, *sender.encode()])
    # The seed of a response follows from its epoch, so these epochs must be ones that no other searcher uses.
    epoch = int(rng.integers(1 << 40, 1 << 62))
    while prompts:
        for index in rng.permutation(len(prompts)):
            yield messages.Visit(lease=fields.NO_VISIT, epoch=epoch, prompt_key=prompts[index].key)
        epoch += 1
