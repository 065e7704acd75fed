"""The task's prompts at the buffer: their registration, and the choice among them while the buffer is away."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tba.common.config import Config
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.searcher.tasks.task import Prompt, Task, fingerprint

_REGISTER_CHUNK = 10_000
# Characters of the texts in one message, which must fit a header also if each takes four bytes.
_REGISTER_CHARACTERS = 1 << 20


def register_prompts(client: BufferClient, task: Task, stop: Callable[[], bool]) -> None:
    """Send the keys and texts of the prompts that the buffer lacks. Raises Refused if it has others."""
    prompts = task.prompts()
    digest = fingerprint(prompts)

    def ask(offset: int, chunk: Sequence[Prompt]) -> messages.Registered:
        message = messages.RegisterPrompts(
            task=task.name,
            fingerprint=digest,
            total=len(prompts),
            offset=offset,
            keys=[prompt.key for prompt in chunk],
            texts=[prompt.text[: fields.MAX_PROMPT_TEXT] for prompt in chunk],
        )
        return client.call(message, messages.Registered, stop=stop)[0]

    registered = ask(0, [])
    while not registered.complete:
        registered = ask(registered.known, _chunk(prompts, registered.known))


def _chunk(prompts: Sequence[Prompt], start: int) -> Sequence[Prompt]:
    """Return as many prompts from a position on as fit one message, at least one."""
    chunk = prompts[start : start + _REGISTER_CHUNK]
    sizes = itertools.accumulate(min(len(prompt.text), fields.MAX_PROMPT_TEXT) for prompt in chunk)
    return chunk[: max(1, sum(size <= _REGISTER_CHARACTERS for size in sizes))]


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
