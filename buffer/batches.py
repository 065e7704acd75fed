"""Batches as messages: from the rows of a recorded batch to what the trainer gets."""

from collections.abc import Sequence

from pydantic_core import from_json

from tba.buffer.index import Entry
from tba.buffer.store import Store
from tba.buffer.tables.runs import Run
from tba.common import wire
from tba.common.codec import MAX_FRAME_BYTES
from tba.common.errors import Refused
from tba.common.trajectory import ARRAY_KINDS


def recorded_batch(store: Store, run: Run, message: wire.SampleBatch) -> tuple[wire.Batch, list[bytes]]:
    """The recorded batch of a step with its array frames. Raises Refused if payloads of it were compacted."""
    rows = store.batches.rows(run, message.step, message.reference)
    blobs = list(zip(*store.trajectories.payloads(rows["id"]), strict=True))
    counts = {
        f"{kind.name}_count": [len(blob) // kind.unit_bytes for blob in column]
        for kind, column in zip(ARRAY_KINDS, blobs, strict=True)
    }
    batch = wire.Batch(
        step=message.step,
        trajectory_ids=rows["id"],
        prompt_key=rows["prompt_key"],
        reward=rows["reward"],
        reward_parts=list(map(from_json, rows["reward_parts"])),
        policy_version=rows["policy_version"],
        staleness=rows["staleness"],
        plain_sampling=[bool(plain) for plain in rows["plain_sampling"]],
        reference_logprobs=rows["reference_logprob"],
        **counts,
    )
    return batch, [b"".join(column) for column in blobs]


def check_size(store: Store, entries: Sequence[Entry]) -> None:
    """A batch that fits no message must not be recorded: it could never be handed out. Raises Refused.

    Only a batch that may be one costs a query: none of its frames is larger than all of them together.
    """
    if sum(entry.payload_bytes for entry in entries) <= MAX_FRAME_BYTES:
        return
    size = 4 * max(store.trajectories.tokens([entry.id for entry in entries]))
    if size > MAX_FRAME_BYTES:
        raise Refused(
            "oversize",
            f"a batch with {size} bytes of tokens, at most {MAX_FRAME_BYTES} fit a message: "
            "lower train.prompts_per_step or search.max_tokens",
        )
