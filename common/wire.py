"""Every message between processes: one class each, with "A -> B, when, reply".

A message is a ZeroMQ multipart: frame 0 is a msgpack map, the *header*; further frames, where the class
says so, are the raw arrays of `tba.common.trajectory`, one frame per kind for the whole batch.

    request header   v, type, id, role, sender, run, body
    reply header     v, type, id, run, state, body

`id` pairs a reply with its request. Every request is idempotent, so a sender that hears nothing sends
the same bytes again: puts are known by (sender, sequence), batches and reports by step, snapshots by
version, leases by the list of those already held. The envelope and its checks are in `codec`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator, with_config
from typing_extensions import TypedDict  # pydantic refuses typing.TypedDict before Python 3.12

from tba.common.quantity import quantity

PROTOCOL_VERSION = 1
MAX_ROWS = 1 << 16
MAX_TOKENS = 1 << 24

Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Id = Annotated[int, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Sentence = Annotated[str, Field(max_length=4000)]
Seconds = Annotated[float, Field(ge=0)]
# Seconds since 1970, before the year 10000: what can be shown as a date.
UnixTime = Annotated[float, Field(ge=0, lt=253_402_300_800)]
LONGEST_WAIT_SECONDS = 60
Wait = Annotated[float, Field(ge=0, le=LONGEST_WAIT_SECONDS)]
Role = Literal["searcher", "trainer", "publisher", "monitor", "importer"]
# A trajectory that no policy of this run made, such as an imported one, has version -1.
NO_POLICY = -1
# The lease of a trajectory that answers no visit: an imported one, or one made while the buffer was away.
NO_VISIT = 0
# The reference that training starts from and stays near: the model of `model.path`, as it was.
INITIAL_REFERENCE = "initial"
LARGEST_REWARD = 1e9
PolicyVersion = Annotated[int, Field(ge=NO_POLICY, lt=1 << 63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
StopReason = Literal["eos", "length", "error"]


class Message(BaseModel):
    """Base of all messages. `TYPE` names it on the wire; `ARRAYS` says that array frames follow, `RAW` one of bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    TYPE: ClassVar[str]
    ARRAYS: ClassVar[bool] = False
    RAW: ClassVar[bool] = False


# ---------------------------------------------------------------- parts of messages


class WeightsRef(Message):
    """Where the newest snapshot is and what it must hash to."""

    version: Id
    step: Id
    path: Sentence
    manifest_sha256: Sha256
    # Where the trainer serves the files of its snapshots; empty where only the path leads to them.
    address: Sentence = ""


class RunState(Message):
    """What every reply carries, so that no second announcement channel can get out of step."""

    weights: WeightsRef | None
    step: Id  # optimiser steps the trainer has reported
    finished: bool  # the trainer is done: searchers drain and leave


class Visit(Message):
    """One turn of one prompt in one epoch; `lease` is its identity."""

    lease: Id
    epoch: Id
    prompt_key: Name


@with_config(Message.model_config)
class Sampling(TypedDict):
    """The settings that a response was sampled with. A map, checked where it is a part of a message: many come in."""

    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]


class ArrayCounts(Message):
    """Units (tokens or runs) of each array kind, per trajectory."""

    prompt_ids_count: list[Count]
    response_ids_count: list[Count]
    logprobs_count: list[Count]
    version_runs_count: list[Annotated[int, Field(ge=1, le=MAX_TOKENS)]]
    loss_mask_count: list[Count]


class Rows(ArrayCounts):
    """The columns of a batch of trajectories, as `tba.common.trajectory.pack` makes them.

    `reference_logprob` is the sequence log-probability under INITIAL_REFERENCE where the searcher computed it. The
    column is left out if no row has one, so that a put without them is the same bytes as before there was the column.
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


class Hello(Message):
    """Any role -> buffer, once after start. Reply: Welcome, or Failure for another run."""

    TYPE = "hello"
    host: Name
    pid: Id
    software: Name


class RegisterPrompts(Message):
    """Searcher -> buffer, before the first lease: the prompt keys of the task, in chunks.

    Reply: Registered. A searcher that hears `complete` stops sending chunks. A fingerprint that differs
    from the registered one is refused: two searchers of a run must work on the same data.
    """

    TYPE = "register_prompts"
    task: Name
    fingerprint: Sha256
    total: Annotated[int, Field(ge=1)]
    offset: Id
    keys: Annotated[list[Name], Field(max_length=MAX_ROWS)]

    @model_validator(mode="after")
    def _a_chunk_lies_within_the_task(self) -> Self:
        if self.offset + len(self.keys) > self.total:
            raise ValueError(f"prompts {self.offset} to {self.offset + len(self.keys) - 1} of a task of {self.total}")
        return self


class LeasePrompts(Message):
    """Searcher -> buffer, when it can take more work. Reply: Leases, after at most `wait_seconds`.

    `held` are the leases it knows to be its own. Leases that the buffer has given to this sender and
    that are not in `held` were lost with a reply, and are given again.
    """

    TYPE = "lease_prompts"
    want: Annotated[int, Field(ge=0, le=MAX_ROWS)]
    held: Annotated[list[Id], Field(max_length=MAX_ROWS)]
    weights_version: Id
    wait_seconds: Wait


class PutTrajectories(Message):
    """Searcher or importer -> buffer, when a group is complete. Reply: PutAck, after the commit.

    Row i has sequence number `first_sequence + i` of this sender; rows that are there already are
    counted as duplicates. Array frames follow. An importer's prompts need not be registered, and its
    versions need not be announced: those, and rows whose metadata has `imported_version`, become NO_POLICY.
    """

    TYPE = "put_trajectories"
    ARRAYS = True
    first_sequence: Id
    rows: Rows


class SampleBatch(Message):
    """Trainer -> buffer, before each step. Reply: Batch, or NotReady after at most `wait_seconds`.

    The batch of a step is recorded before it is handed out, and asking again for the same step gives
    the same batch: a trainer that resumes from a checkpoint repeats the very steps it had made.
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


class ReportStep(Message):
    """Trainer -> buffer, after the optimiser step. Reply: Done.

    `reference_logprobs[i]` is the sequence log-probability of `trajectory_ids[i]` under `reference`,
    stored so that it is computed once per trajectory and reference.
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


class AnnounceSnapshot(Message):
    """Publisher (a thread of the trainer) -> buffer, after the snapshot has its name. Reply: Done."""

    TYPE = "announce_snapshot"
    weights: WeightsRef
    bytes: Id


class FinishRun(Message):
    """Trainer -> buffer, after its last step. Reply: Done. From then on every reply says `finished`."""

    TYPE = "finish_run"
    step: Id


class Heartbeat(Message):
    """Any role -> buffer, every second or two. Reply: Done. Keeps the sender's leases alive.

    `activity` is one word; `reason` says for what it waits, if it waits.
    """

    TYPE = "heartbeat"
    activity: Name
    reason: Sentence
    weights_version: Id | None
    metrics: dict[str, float]


class Goodbye(Message):
    """Searcher -> buffer, before it leaves. Reply: Done. Its leases go to others at once."""

    TYPE = "goodbye"


class GetStatus(Message):
    """Monitor -> buffer, at any time. Reply: Status."""

    TYPE = "get_status"


# ---------------------------------------------------------------- replies


class Welcome(Message):
    """Reply to Hello: what a newcomer must know."""

    TYPE = "welcome"
    run_name: Name
    next_version: Id  # the version the trainer gives to its next snapshot
    recorded_steps: Id  # batches up to this step are recorded and will be repeated on resume


class Registered(Message):
    """Reply to RegisterPrompts."""

    TYPE = "registered"
    known: Id
    complete: bool


class Leases(Message):
    """Reply to LeasePrompts. Empty with a `reason` when the rate limiter holds searchers back."""

    TYPE = "leases"
    visits: list[Visit]
    reason: Sentence


class PutAck(Message):
    """Reply to PutTrajectories: the rows are committed."""

    TYPE = "put_ack"
    first_sequence: Id
    stored: Id
    duplicates: Id


class Batch(ArrayCounts):
    """Reply to SampleBatch: `prompts` x `samples` trajectories, those of a prompt side by side.

    Array frames follow. A trajectory that was drawn twice stands there twice.
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
    plain_sampling: list[bool]  # sampled at temperature 1 and top_p 1, as the trainer computes
    reference_logprobs: list[float | None]


class NotReady(Message):
    """Reply to SampleBatch: not enough to train on, and why."""

    TYPE = "not_ready"
    reason: Sentence


class Done(Message):
    """Reply to requests that have no other: it is committed."""

    TYPE = "done"


class ClientStatus(Message):
    """One client of the buffer, as `tba status` shows it."""

    role: Role
    sender: Name
    host: str
    silent_seconds: Seconds
    activity: str
    reason: str
    weights_version: Id | None
    metrics: dict[str, float]
    trajectories: Id  # stored since the server started
    duplicates: Id  # rows that came again
    leases: Id


class Status(Message):
    """Reply to GetStatus."""

    TYPE = "status"
    run_name: Name
    step: Id  # optimiser steps reported
    finished: bool
    uptime_seconds: Seconds
    epoch: Id
    prompts: Id
    trajectories: Id
    errors: Id
    duplicates: Id
    sampleable: Id
    puts_per_second: Seconds
    database_bytes: Id
    queued_bytes: Id  # received, and waiting for a transaction
    commit_seconds: Seconds  # mean of the last transactions, with what was done in them
    rejected: dict[str, int]
    trainer_waits_for: str
    clients: list[ClientStatus]


class Failure(Message):
    """Reply to anything the buffer could not do. `code` is for programs, `message` for people."""

    TYPE = "failure"
    code: Name
    message: Sentence


# ---------------------------------------------------------------- files of snapshots

# The second conversation, which needs no buffer: a searcher without a shared file system asks the trainer. Its
# replies carry no run state, since the trainer is not the one to say what the newest is.

MAX_CHUNK_BYTES = 4 << 20


class FetchChunk(Message):
    """Searcher -> trainer's file server, several at a time. Reply: Chunk, or Failure if there is no such file.

    `file` is `manifest.json` or one that the manifest of the version names.
    """

    TYPE = "fetch_chunk"
    version: Id
    file: Name
    offset: Id
    length: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]


class Chunk(Message):
    """Reply to FetchChunk: one frame of bytes follows, shorter than asked for only at the end of the file."""

    TYPE = "chunk"
    RAW = True
    offset: Id
    file_bytes: Id


FILE_REQUESTS: dict[str, type[Message]] = {FetchChunk.TYPE: FetchChunk}
FILE_REPLIES: dict[str, type[Message]] = {cls.TYPE: cls for cls in (Chunk, Failure)}

# ---------------------------------------------------------------- by name

REQUESTS: dict[str, type[Message]] = {
    cls.TYPE: cls
    for cls in (
        Hello,
        RegisterPrompts,
        LeasePrompts,
        PutTrajectories,
        SampleBatch,
        ReportStep,
        AnnounceSnapshot,
        FinishRun,
        Heartbeat,
        Goodbye,
        GetStatus,
    )
}
REPLIES: dict[str, type[Message]] = {
    cls.TYPE: cls for cls in (Welcome, Registered, Leases, PutAck, Batch, NotReady, Done, Status, Failure)
}
