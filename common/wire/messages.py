"""Every message between processes: one class each, with "A -> B, when, reply".

A message is a ZeroMQ multipart. Frame 0 is a msgpack map, the *header*. If the class says so, further frames are the
raw arrays of `tba.common.wire.trajectory`, one frame per kind for the whole batch.

    request header   v, type, id, role, sender, run, body
    reply header     v, type, id, run, state, body

`id` pairs a reply with its request. Every request is idempotent, so a sender that gets no reply sends the same bytes
again: puts are identified by (sender, sequence), batches and reports by step, snapshots by version, leases by the list
of those already held. The envelope and its checks are in `codec`, the files of snapshots in `file_messages`, the
status in `status_messages`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator, with_config

# Pydantic refuses typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from tba.common.quantity import quantity

PROTOCOL_VERSION = 1
MAX_ROWS = 1 << 16
MAX_TOKENS = 1 << 24
# Characters of a prompt's text: a longer one is cut, since people read it and nothing is computed from it.
MAX_PROMPT_TEXT = 1 << 16
# The ancestors of a node in a tree of 31.
MAX_SOURCES = 4

Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Id = Annotated[int, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Sentence = Annotated[str, Field(max_length=4000)]
PromptText = Annotated[str, Field(max_length=MAX_PROMPT_TEXT)]
Seconds = Annotated[float, Field(ge=0)]
# Seconds since 1970, before the year 10000, so that every value is a valid date.
UnixTime = Annotated[float, Field(ge=0, lt=253_402_300_800)]
LONGEST_WAIT_SECONDS = 60
Wait = Annotated[float, Field(ge=0, le=LONGEST_WAIT_SECONDS)]
Role = Literal["searcher", "trainer", "publisher", "monitor", "importer"]
# The version of a trajectory that no policy of this run generated, such as an imported one.
NO_POLICY = -1
# The lease of a trajectory without a visit: imported, or generated while the buffer was unavailable.
NO_VISIT = 0
# The initial reference policy: the model at `model.path` before training.
INITIAL_REFERENCE = "initial"
LARGEST_REWARD = 1e9
PolicyVersion = Annotated[int, Field(ge=NO_POLICY, lt=1 << 63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
StopReason = Literal["eos", "length", "error"]


class Message(BaseModel):
    """Base of all messages. `TYPE` names it on the wire; `ARRAYS`: array frames follow; `RAW`: one frame of bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    TYPE: ClassVar[str]
    ARRAYS: ClassVar[bool] = False
    RAW: ClassVar[bool] = False


class Request(Message):
    """Base of the requests to the buffer. `codec` accepts all subclasses of this module."""


class Reply(Message):
    """Base of the buffer's replies, as `Request`."""


class WeightsRef(Message):
    """Where a snapshot is, and the hash of its manifest.

    `address` is the trainer's file server, empty if the files can only be read at `path`.
    """

    version: Id
    step: Id
    path: Sentence
    manifest_sha256: Sha256
    address: Sentence = ""


class RunState(Message):
    """The state of the run that every reply carries: a separate announcement could contradict a reply.

    `weights` is the newest snapshot, `step` the number of optimiser steps that the trainer has reported. Once the
    trainer has `finished`, searchers deliver what they have and exit.
    """

    weights: WeightsRef | None
    step: Id
    finished: bool


class Visit(Message):
    """A prompt handed out once in an epoch. `lease` is its id, and the right to answer it."""

    lease: Id
    epoch: Id
    prompt_key: Name


@with_config(Message.model_config)
class Sampling(TypedDict):
    """The settings that a response was sampled with. A map, because building many objects would take too long."""

    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]


class ArrayCounts(Message):
    """The length of each array per trajectory, in units of its kind: tokens, or version runs."""

    prompt_ids_count: list[Count]
    response_ids_count: list[Count]
    logprobs_count: list[Count]
    version_runs_count: list[Annotated[int, Field(ge=1, le=MAX_TOKENS)]]
    loss_mask_count: list[Count]


class Rows(ArrayCounts):
    """The columns of a put, as `tba.common.wire.trajectory.pack` returns them.

    `reference_logprob` is the sequence log-probability under INITIAL_REFERENCE, if the searcher computed it. The column
    is left out if no row has one.
    """

    prompt_key: Annotated[list[Name], Field(min_length=1, max_length=MAX_ROWS)]
    lease: list[Id]
    reward: list[Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]]
    reward_parts: list[dict[str, float]]
    stop_reason: list[StopReason]
    sampling: list[Sampling]
    created_at: list[UnixTime]
    generation_seconds: list[Seconds]
    text: list[str | None]
    error: list[Sentence | None]
    metadata: list[dict[str, Any]]
    reference_logprob: Annotated[list[float | None] | None, Field(exclude_if=lambda column: column is None)] = None

    @model_validator(mode="after")
    def _columns_are_equally_long(self) -> Self:
        rows = len(self.prompt_key)
        for name, column in self.__dict__.items():
            if column is not None and len(column) != rows:
                raise ValueError(f"column {name} has {quantity(len(column), 'row')}, prompt_key has {rows}")
        return self


# ---------------------------------------------------------------- requests


class Hello(Request):
    """Any role -> buffer, once after start. Reply: Welcome, or Failure if the sender belongs to another run."""

    TYPE = "hello"
    host: Name
    pid: Id
    software: Name


class RegisterPrompts(Request):
    """Searcher -> buffer, before the first lease: the prompt keys of the task, in chunks.

    `texts` are the prompts as text, for people who query the database: none at all, or one per key, None where it
    is not known.
    Reply: Registered. Prompts are added in their order, so a chunk after the first missing prompt adds nothing: the
    searcher continues from `known`, until it receives `complete`. A fingerprint other than the registered one is
    refused: all searchers of a run must work on the same data.
    """

    TYPE = "register_prompts"
    task: Name
    fingerprint: Sha256
    total: Annotated[int, Field(ge=1)]
    offset: Id
    keys: Annotated[list[Name], Field(max_length=MAX_ROWS)]
    texts: Annotated[list[PromptText | None], Field(max_length=MAX_ROWS, exclude_if=lambda texts: not texts)] = []

    @model_validator(mode="after")
    def _a_chunk_lies_within_the_task(self) -> Self:
        if self.texts and len(self.texts) != len(self.keys):
            raise ValueError(f"{len(self.texts)} texts of {quantity(len(self.keys), 'prompt')}")
        if self.offset + len(self.keys) > self.total:
            raise ValueError(f"prompts {self.offset} to {self.offset + len(self.keys) - 1} of a task of {self.total}")
        return self


class LeasePrompts(Request):
    """Searcher -> buffer, when it has room for more prompts. Reply: Leases, after at most `wait_seconds`.

    `held` are the leases that the searcher has received. Other leases granted to this sender were lost with a reply,
    and are granted again.
    """

    TYPE = "lease_prompts"
    want: Annotated[int, Field(ge=0, le=MAX_ROWS)]
    held: Annotated[list[Id], Field(max_length=MAX_ROWS)]
    weights_version: Id
    wait_seconds: Wait


class PutTrajectories(Request):
    """Searcher or importer -> buffer, when a group is complete. Reply: PutAck, after the commit.

    Row i has sequence number `first_sequence + i` of this sender; rows already stored are counted as duplicates. Array
    frames follow. An importer's prompts need not be registered and its versions need not be announced: unknown
    versions, and those of rows whose metadata has `imported_version`, become NO_POLICY.
    """

    TYPE = "put_trajectories"
    ARRAYS = True
    first_sequence: Id
    rows: Rows


class SampleBatch(Request):
    """Trainer -> buffer, before each step. Reply: Batch, or NotReady after at most `wait_seconds`.

    The batch of a step is recorded before it is handed out, and a repeated request returns the same batch: a trainer
    that resumes from a checkpoint repeats the steps that it had done.
    """

    TYPE = "sample_batch"
    step: Id
    prompts: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    samples: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    reference: Name
    wait_seconds: Wait

    @model_validator(mode="after")
    def _a_batch_has_a_size(self) -> Self:
        if self.prompts * self.samples > MAX_ROWS:
            raise ValueError(f"{self.prompts} x {self.samples} trajectories in a batch, at most {MAX_ROWS}")
        return self


class ReportStep(Request):
    """Trainer -> buffer, after the optimiser step. Reply: Done.

    `reference_logprobs[i]`, the sequence log-probability of `trajectory_ids[i]` under `reference`, is computed once.
    """

    TYPE = "report_step"
    step: Id
    metrics: dict[str, float]
    reference: Name
    trajectory_ids: Annotated[list[Id], Field(max_length=MAX_ROWS)]
    reference_logprobs: Annotated[list[float], Field(max_length=MAX_ROWS)]

    @model_validator(mode="after")
    def _one_logprob_each(self) -> Self:
        if len(self.trajectory_ids) != len(self.reference_logprobs):
            raise ValueError("trajectory_ids and reference_logprobs differ in length")
        return self


class AnnounceSnapshot(Request):
    """Publisher (a thread of the trainer) -> buffer, after the snapshot has its final name. Reply: Done."""

    TYPE = "announce_snapshot"
    weights: WeightsRef
    bytes: Id


class FinishRun(Request):
    """Trainer -> buffer, after its last step. Reply: Done. Every later reply carries `finished`."""

    TYPE = "finish_run"
    step: Id


class Heartbeat(Request):
    """Any role -> buffer, every second or two. Reply: Done or Sources. Keeps the sender's leases alive.

    `activity` is one word; `reason` is a warning, or what the sender waits for, if it waits. `serves` is the address at
    which the sender's node serves snapshots to others, or empty: if it is set, the reply is Sources.
    """

    TYPE = "heartbeat"
    activity: Name
    reason: Sentence
    weights_version: Id | None
    metrics: dict[str, float]
    serves: Sentence = ""


class Goodbye(Request):
    """Any role -> buffer, before it exits. Reply: Done. The leases of a searcher are released immediately."""

    TYPE = "goodbye"


# ---------------------------------------------------------------- replies


class Welcome(Reply):
    """Reply to Hello.

    `next_version` is the version of the trainer's next snapshot. The batches of steps before `recorded_steps` are
    recorded: a resumed trainer receives them again.
    """

    TYPE = "welcome"
    run_name: Name
    next_version: Id
    recorded_steps: Id


class Registered(Reply):
    """Reply to RegisterPrompts. The first `known` prompts of the task are registered."""

    TYPE = "registered"
    known: Id
    complete: bool


class Leases(Reply):
    """Reply to LeasePrompts. No visits and a `reason` if the searcher must wait."""

    TYPE = "leases"
    visits: list[Visit]
    reason: Sentence


class PutAck(Reply):
    """Reply to PutTrajectories: the rows are committed."""

    TYPE = "put_ack"
    first_sequence: Id
    stored: Id
    duplicates: Id


class Batch(ArrayCounts, Reply):
    """Reply to SampleBatch: `prompts` x `samples` trajectories, those of a prompt adjacent.

    Array frames follow. A trajectory that was drawn twice occurs twice. `staleness` is in optimiser steps.
    `plain_sampling`: sampled at temperature 1 and top_p 1, the distribution that the trainer computes.
    `recency_groups` of the prompts were drawn by recency; `recency_missed` of them have no data within
    `recency_window` steps.
    """

    TYPE = "batch"
    ARRAYS = True
    step: Id
    trajectory_ids: list[Id]
    prompt_key: list[Name]
    reward: list[float]
    reward_parts: list[dict[str, float]]
    policy_version: list[PolicyVersion]
    staleness: list[int]
    plain_sampling: list[bool]
    reference_logprobs: list[float | None]
    recency_window: Id
    recency_groups: Id
    recency_missed: Id


class NotReady(Reply):
    """Reply to SampleBatch: there is too little data, and why."""

    TYPE = "not_ready"
    reason: Sentence


class Sources(Reply):
    """Reply to the Heartbeat of a searcher whose node serves snapshots: the nodes to ask before the trainer, in order.

    They form a binary tree in the order of their first messages: each node has its ancestors, the nearest first.
    """

    TYPE = "sources"
    addresses: Annotated[list[Sentence], Field(max_length=MAX_SOURCES)]


class Done(Reply):
    """Reply to requests without a reply of their own: the request is committed."""

    TYPE = "done"


class Failure(Reply):
    """Reply to a request that was refused or failed. `code` is for programs, `message` for people."""

    TYPE = "failure"
    code: Name
    message: Sentence
