"""Every message between processes: one class each, with "A -> B, when, reply".

A message is a ZeroMQ multipart. Frame 0 is a msgpack map, the *header*. If the class says so, further frames are the
raw arrays of `tba.common.wire.trajectory`, one frame per kind for the whole batch.

    request header   v, type, id, role, sender, run, body
    reply header     v, type, id, run, state, body

`id` pairs a reply with its request. Every request is idempotent, so a sender that gets no reply sends the same bytes
again: puts are identified by (sender, sequence), batches and reports by step, snapshots by version, leases by the list
of those already held. The envelope and its checks are in `codec`. `FetchChunk` and `Chunk` are a conversation with a
snapshot server, whose replies carry no run state: a server does not decide which snapshot is the newest.
"""

from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from tba.common.errors import quantity
from tba.common.wire.fields import (
    LARGEST_REWARD,
    MAX_CLIENTS,
    MAX_LEASES,
    MAX_PHASES,
    MAX_PUT_ROWS,
    MAX_REASON,
    MAX_ROWS,
    MAX_SOURCES,
    MAX_TOKENS,
    MAX_TURNS,
    Column,
    Count,
    ErrorKind,
    Finite,
    Id,
    Metrics,
    Name,
    PolicyVersion,
    PromptText,
    PutColumn,
    RewardParts,
    Role,
    Seconds,
    Sentence,
    Sha256,
    StallReason,
    StopReason,
    Temperature,
    UnixTime,
    Wait,
)
from tba.common.wire.trajectory import RowNumbers, TurnRecord

PROTOCOL_VERSION = 3


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. `TYPE` names it on the wire; `ARRAYS`: array frames follow; `RAW`: one frame of bytes.

    The types of fields are checked when a message is decoded, not when it is constructed. Every list, map and text has
    a maximal length, so that the memory of a decoded message is limited.
    """

    TYPE: ClassVar[str]
    ARRAYS: ClassVar[bool] = False
    RAW: ClassVar[bool] = False


class Request(Message, frozen=True):
    """Base of the requests to the buffer. `codec` accepts all subclasses of this module."""


class Reply(Message, frozen=True):
    """Base of the buffer's replies, as `Request`."""


class WeightsRef(Message, frozen=True):
    """Where a snapshot is, and the hash of its manifest.

    `address` is the trainer's file server, empty if the files can only be read at `path`.
    """

    version: Id
    step: Id
    path: Sentence
    manifest_sha256: Sha256
    address: Sentence = ""


class RunState(Message, frozen=True, omit_defaults=True):
    """The state of the run in every reply: newest snapshot, reported steps, whether all are done.

    `heartbeat_seconds` is the time between a searcher's heartbeats.
    """

    weights: WeightsRef | None
    step: Id
    finished: bool
    heartbeat_seconds: Annotated[int, Meta(ge=1, le=3)] = 1


class Visit(Message, frozen=True, omit_defaults=True):
    """A prompt handed out once in an epoch. `lease` is its id, the right to answer it; `stored` rows of it are put."""

    lease: Id
    epoch: Id
    prompt_key: Name
    # The largest fraction of the demonstration with which its responses may begin (`search.guided`).
    guide: Annotated[float, Meta(ge=0, le=1)] = 1.0
    stored: Id = 0


class Sampling(Message, frozen=True, omit_defaults=True):
    """The settings that a response was sampled with. `top_k` 0 keeps all tokens.

    `guided` is how many tokens of a demonstration the response begins with, None without `search.guided`. `phase` is
    the number of the entry of `task.phases` whose reward it has, from 0.
    """

    temperature: Temperature
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    guided: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    phase: Annotated[int, Meta(ge=0, le=MAX_PHASES)] | None = None


class ArrayCounts(Message, frozen=True):
    """The length of each array per trajectory, in units of its kind: tokens, or version runs."""

    prompt_ids_count: Column[Count]
    response_ids_count: Column[Count]
    logprobs_count: Column[Count]
    version_runs_count: Column[Annotated[int, Meta(ge=1, le=MAX_TOKENS)]]
    loss_mask_count: Column[Count]
    segments_count: Column[Count]


class Rows(ArrayCounts, omit_defaults=True, frozen=True):
    """The columns of a put, as `tba.common.wire.trajectory.pack` returns them.

    `turns` and `error_kind` are left out if no row has a value. `metadata` are maps of any content, decoded row by row
    by `put_columns`; a sender passes them, and the turns, as dicts.
    """

    prompt_key: Annotated[list[Name], Meta(min_length=1, max_length=MAX_PUT_ROWS)]
    lease: PutColumn[Id]
    reward: PutColumn[Annotated[float, Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]]
    reward_parts: PutColumn[RewardParts]
    stop_reason: PutColumn[StopReason]
    sampling: PutColumn[Sampling]
    created_at: PutColumn[UnixTime]
    generation_seconds: PutColumn[Seconds]
    text: PutColumn[str | None]
    error: PutColumn[Sentence | None]
    metadata: PutColumn[Raw]
    turns: PutColumn[Annotated[list[TurnRecord], Meta(max_length=MAX_TURNS)]] | None = None
    error_kind: PutColumn[ErrorKind | None] | None = None
    kept_count: Column[Count] | UnsetType = UNSET

    def __post_init__(self) -> None:
        rows = len(self.prompt_key)
        for name in self.__struct_fields__:
            column = getattr(self, name)
            if column is not None and column is not UNSET and len(column) != rows:
                raise ValueError(f"column {name} has {quantity(len(column), 'row')}, prompt_key has {rows}")


# ---------------------------------------------------------------- requests


class Hello(Request, frozen=True, omit_defaults=True):
    """Any role -> buffer, once after start. Reply: Welcome, also if its run is not `run_name`; or Failure."""

    TYPE = "hello"
    host: Name
    pid: Id
    run_name: Name = ""


class RegisterPrompts(Request, frozen=True, omit_defaults=True):
    """Searcher -> buffer, before the first lease: the prompt keys of the task, in chunks.

    `texts` are the prompts and `answers` their reference answers, for people: none, or one per key, None if unknown.
    Reply: Registered. Prompts are added in their order, so a chunk after the first missing prompt adds nothing: the
    searcher continues from `known`, until it receives `complete`. A request without keys only asks. A fingerprint other
    than the registered one is refused: all searchers of a run must work on the same data.
    """

    TYPE = "register_prompts"
    task: Name
    fingerprint: Sha256
    total: Annotated[int, Meta(ge=1)]
    offset: Id
    keys: Column[Name]
    texts: Column[PromptText | None] = []
    answers: Column[PromptText | None] = []

    def __post_init__(self) -> None:
        for name, column in (("texts", self.texts), ("answers", self.answers)):
            if column and len(column) != len(self.keys):
                raise ValueError(f"{len(column)} {name} of {quantity(len(self.keys), 'prompt')}")
        if self.offset + len(self.keys) > self.total:
            raise ValueError(f"prompts {self.offset} to {self.offset + len(self.keys) - 1} of a task of {self.total}")


class LeasePrompts(Request, frozen=True):
    """Searcher -> buffer, when it has room for more prompts. Reply: Leases, after at most `wait_seconds`.

    `held` are the leases that the searcher has received. Other leases granted to this sender were lost with a reply,
    and are granted again.
    """

    TYPE = "lease_prompts"
    want: Annotated[int, Meta(ge=1, le=MAX_LEASES)]
    held: Annotated[list[Id], Meta(max_length=MAX_LEASES)]
    weights_version: Id
    wait_seconds: Wait


class PutTrajectories(Request, frozen=True, omit_defaults=True):
    """Searcher or importer -> buffer, when a group or response is complete. Reply: PutAck, after the commit.

    Row i has sequence number `first_sequence + i` of this sender; stored rows are counted as duplicates. Array frames
    follow. `closes`: these are the last rows of their visits. An importer's prompts need not be registered. Unknown
    versions, and those of rows with `imported_version` or `policy` (explorers) in metadata, become NO_POLICY.
    """

    TYPE = "put_trajectories"
    ARRAYS = True
    first_sequence: Id
    rows: Rows
    closes: bool = True


class SampleBatch(Request, frozen=True):
    """Trainer -> buffer, before each step. Reply: Batch, the same if repeated, or NotReady after `wait_seconds`."""

    TYPE = "sample_batch"
    step: Id
    prompts: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    samples: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    reference: Name
    wait_seconds: Wait

    def __post_init__(self) -> None:
        if self.prompts * self.samples > MAX_ROWS:
            raise ValueError(f"{self.prompts} x {self.samples} trajectories in a batch, at most {MAX_ROWS}")


class ReportStep(Request, frozen=True):
    """Trainer -> buffer, after the optimiser step. Reply: Done.

    `reference_logprobs[i]`, the sequence log-probability of `trajectory_ids[i]` under `reference`, is computed once.
    `rows` has as many numbers of each kind as the batch has slots.
    """

    TYPE = "report_step"
    step: Id
    metrics: Annotated[dict[Name, Finite], Meta(max_length=1024)]
    reference: Name
    trajectory_ids: Column[Id]
    reference_logprobs: Column[Finite]
    rows: RowNumbers | None = None

    def __post_init__(self) -> None:
        if len(self.trajectory_ids) != len(self.reference_logprobs):
            raise ValueError("trajectory_ids and reference_logprobs differ in length")


class AnnounceSnapshot(Request, frozen=True):
    """Publisher (a thread of the trainer) -> buffer, after the snapshot has its final name. Reply: Done."""

    TYPE = "announce_snapshot"
    weights: WeightsRef
    bytes: Id


class FinishRun(Request, frozen=True):
    """Trainer -> buffer, after its last step. Reply: Done. Every later reply carries `finished`."""

    TYPE = "finish_run"
    step: Id


class Heartbeat(Request, frozen=True):
    """Any role -> buffer, every second to every third. Reply: Done or Sources. Keeps the sender's leases alive.

    `activity` is one word; `reason` is what the sender waits for, or what is in its way. A supervisor is a monitor, and
    says "failing" while a child of it does not work: `reason` quotes that child's error, and its `metrics` name the
    kinds of children that load their model. `serves`, if set, is the address at which the sender's node serves
    snapshots: the reply is Sources. `warning` is the trainer's, on the training.
    """

    TYPE = "heartbeat"
    activity: Annotated[str, Meta(min_length=1, max_length=64)]
    reason: Annotated[str, Meta(max_length=MAX_REASON)]
    weights_version: Id | None
    metrics: Metrics
    serves: Sentence = ""
    warning: Annotated[str, Meta(max_length=MAX_REASON)] = ""


class Goodbye(Request, frozen=True):
    """Any role -> buffer, before it exits. Reply: Done. The leases of a searcher are released immediately."""

    TYPE = "goodbye"


# ---------------------------------------------------------------- replies


class Welcome(Reply, frozen=True):
    """Reply to Hello. Batches before `recorded_steps` are recorded: a resumed trainer receives them again."""

    TYPE = "welcome"
    run_name: Name
    next_version: Id
    recorded_steps: Id


class Registered(Reply, frozen=True, omit_defaults=True):
    """Reply to RegisterPrompts. The first `known` prompts of the task are registered.

    `wait`: another searcher sends the rest, so that this one need not. It asks again, a little later.
    """

    TYPE = "registered"
    known: Id
    complete: bool
    wait: bool = False


class Leases(Reply, frozen=True):
    """Reply to LeasePrompts. No visits and a `reason` if the searcher must wait."""

    TYPE = "leases"
    visits: Column[Visit]
    reason: Sentence


class PutAck(Reply, frozen=True):
    """Reply to PutTrajectories: the rows are committed."""

    TYPE = "put_ack"
    first_sequence: Id
    stored: Id
    duplicates: Id


class Batch(ArrayCounts, Reply, frozen=True):
    """Reply to SampleBatch: `prompts` x `samples` trajectories, those of a prompt adjacent. Array frames follow.

    `staleness` is in optimiser steps. `policy_version` is -1 for a trajectory that no policy of this run sampled.
    `temperature` is 0 where the distribution that was sampled from cannot be computed. `recency_groups` of the prompts
    were drawn by recency; `recency_missed` of them have no data within `recency_window` steps. `reuse_mean` is how
    often earlier batches had each trajectory. `turn_rewards` are those of each row's turns, None without episodes.
    `explored`: whether an explorer (`search.policy`) sampled the row, `guided`: whether it is of a guided visit; each
    left out if none is.
    """

    TYPE = "batch"
    ARRAYS = True
    step: Id
    trajectory_ids: Column[Id]
    prompt_key: Column[Name]
    reward: Column[Finite]
    reward_parts: Column[RewardParts]
    policy_version: Column[PolicyVersion]
    staleness: Column[int]
    temperature: Column[Temperature]
    reference_logprobs: Column[Finite | None]
    recency_window: Id
    recency_groups: Id
    recency_missed: Id
    reuse_mean: Finite
    turn_rewards: Column[list[Finite]] | None = None
    kept_count: Column[Count] | UnsetType = UNSET
    explored: Column[bool] | UnsetType = UNSET
    guided: Column[bool] | UnsetType = UNSET


class NotReady(Reply, frozen=True):
    """Reply to SampleBatch: there is too little data, and why."""

    TYPE = "not_ready"
    reason: Sentence


class Sources(Reply, frozen=True):
    """Reply to the Heartbeat of a searcher whose node serves snapshots: the nodes to ask before the trainer, in order.

    They form a binary tree in the order of their first messages: each node has its ancestors, the nearest first.
    """

    TYPE = "sources"
    addresses: Annotated[list[Sentence], Meta(max_length=MAX_SOURCES)]


class Done(Reply, frozen=True):
    """Reply to requests without a reply of their own: the request is committed."""

    TYPE = "done"


class Failure(Reply, frozen=True):
    """Reply to a request that was refused or failed. `code` is for programs, `message` for people."""

    TYPE = "failure"
    code: Name
    message: Sentence


# ---------------------------------------------------------------- evaluations

_MAX_METRICS = 1024
MAX_NOT_MEASURED = 4096
MAX_RESPONSES = 10_000
MAX_STORED_TEXT = 4000
StoredText = Annotated[str, Meta(max_length=MAX_STORED_TEXT)]


class HeldOutResponse(Struct, frozen=True, forbid_unknown_fields=True):
    """The greedy response to a held-out prompt, with the reference `answer` and its score. Texts may be cut."""

    prompt: Name
    prompt_text: StoredText
    answer: StoredText
    response: StoredText
    reward: Finite
    reward_parts: RewardParts
    error: StoredText | None = None


class PutEvaluation(Request, frozen=True):
    """Evaluator or `tba eval` -> buffer, when a snapshot is evaluated. Reply: Done.

    (`version`, `prompt_set`, `settings`) identify it: a repeated one replaces the earlier one. `intervals` are the ends
    of 95 % intervals, `responses` those to the first prompts, `not_measured` why metrics are missing.
    """

    TYPE = "put_evaluation"
    version: Id
    step: Id
    prompts: Id
    prompt_set: Name
    settings: Name
    evaluated_at: UnixTime
    seconds: Seconds
    metrics: Annotated[dict[Name, Finite], Meta(max_length=_MAX_METRICS)]
    intervals: Annotated[dict[Name, tuple[Finite, Finite]], Meta(max_length=_MAX_METRICS)]
    not_measured: Annotated[str, Meta(max_length=MAX_NOT_MEASURED)] = ""
    responses: Annotated[list[HeldOutResponse], Meta(max_length=MAX_RESPONSES)] = field(default_factory=list)


# ---------------------------------------------------------------- status


class Stall(Struct, frozen=True):
    """Why a run stands still: a reason for machines and a sentence for people, printable on a terminal."""

    reason: StallReason
    sentence: Sentence


class GetStatus(Request, frozen=True):
    """Monitor -> buffer, at any time. Reply: Status."""

    TYPE = "get_status"


class ClientStatus(Message, frozen=True):
    """One client of the buffer in `tba status`: rows since the server started, and seconds in this activity."""

    role: Role
    sender: Name
    host: str
    silent_seconds: Seconds
    activity: str
    reason: str
    weights_version: Id | None
    # Checked as `Metrics` when they came: to check those of a thousand clients again takes 10 ms.
    metrics: dict[str, float]
    trajectories: Id
    duplicates: Id
    leases: Id
    activity_seconds: Seconds = 0.0
    warning: str = ""


class Status(Reply, frozen=True):
    """Reply to GetStatus. `step` counts reported optimiser steps; `queued_bytes` wait for a transaction.

    `stall` is why the run stands still, None while it moves; the other fields after `clients` are what it was found
    from. Times are in seconds, `last_*` since a step was reported or a row stored (or the server started),
    `usual_step_seconds` the mean time between the last steps, 0 if unknown. `earlier_version` was the newest one when
    the trainer, or the server, started. Rows and errors count since the last step; `fruitless_rows` arrived in
    `fruitless_seconds` without more of what the awaited batch needs, and `left_sampling` counts those that left since,
    by key of [buffer]. `common_error` is the most frequent of the last 1,000.
    """

    TYPE = "status"
    run_name: Name
    step: Id
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
    queued_bytes: Id
    commit_seconds: Seconds
    rejected: dict[str, int]
    trainer_waits_for: str
    batches_without_recent_data: Id
    no_recent_data: str
    clients: Annotated[list[ClientStatus], Meta(max_length=MAX_CLIENTS)]
    stall: Stall | None = None
    stalled_seconds: Seconds = 0.0
    newest_version: Id | None = None
    earlier_version: Id | None = None
    trainer_waits_seconds: Seconds = 0.0
    last_step_seconds: Seconds = 0.0
    usual_step_seconds: Seconds = 0.0
    last_put_seconds: Seconds = 0.0
    refuses_puts: str = ""
    disk_bytes: Id = 0
    free_bytes: Id = 0
    rows_since_step: Id = 0
    errors_since_step: Id = 0
    common_error: str = ""
    fruitless_seconds: Seconds = 0.0
    fruitless_rows: Id = 0
    left_sampling: dict[str, int] = field(default_factory=dict)
    skipped_prompts: Id = 0
    postponed_prompts: Id = 0


# ---------------------------------------------------------------- files of snapshots

MAX_CHUNK_BYTES = 1 << 20


class FetchChunk(Message, frozen=True):
    """Searcher -> snapshot server, several at a time. Reply: Chunk, or Failure if the file is not here, or not yet.

    `file` is `manifest.json` or a file that the manifest of the version names.
    """

    TYPE = "fetch_chunk"
    version: Id
    file: Name
    offset: Id
    length: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]


class Chunk(Message, frozen=True):
    """Reply to FetchChunk. One frame of bytes follows, shorter than requested only at the end of the file."""

    TYPE = "chunk"
    RAW = True
    offset: Id
    file_bytes: Id


# ---------------------------------------------------------------- the archive

# A file of `tba buffer archive` at any place. URLs with `::` chain file systems, of which some run code.
FILE_URL = r"(?!.*::)(?!.*/\.\.?/)[a-z][a-z0-9+.-]*://.+/\d{12}-[0-9a-f]{8}\.parquet"
# The trajectories of a message: their tokens are dropped in one transaction, which others wait for.
MAX_ARCHIVED = 1 << 10
_ArchivedIds = Annotated[list[Id], Meta(max_length=MAX_ARCHIVED)]


class Archive(Request, frozen=True):
    """`tba buffer archive` -> buffer, while it looks for old trajectories, and when a file is complete. Reply: Movable.

    Old are those that have left sampling and are in no batch that is not trained yet, nor in one from `since_step` on.
    Without a `url`, asks for those after the id `after`. With it, drops the tokens of the old ones of `trajectories`,
    which this file has, and records that in the same transaction. `complete`: the rest of the file was dropped before.
    """

    TYPE = "archive"
    since_step: Id
    after: Id = 0
    url: Annotated[Sentence, Meta(pattern=rf"^(|{FILE_URL})\Z")] = ""
    trajectories: _ArchivedIds = field(default_factory=list)
    complete: bool = False


class Movable(Reply, frozen=True):
    """Reply to Archive: those asked for, and the id to ask `after` for more, None at the end; or those dropped."""

    TYPE = "movable"
    trajectories: _ArchivedIds
    after: Id | None = None
