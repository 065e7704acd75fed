"""The searcher's loop with a real engine and a real buffer service, without sockets.

A slow buffer is one whose replies arrive a given number of engine steps later, so the load of the machine does not
matter.
"""

import re
import shutil
import socket
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict

from tba.buffer.server.prometheus import SEARCHER_NAMES
from tba.buffer.service.clients import Clients
from tba.common.config import TaskSection
from tba.common.wire import messages
from tba.common.wire.codec import decode_request, encode_request
from tba.common.wire.trajectory import unpack_arrays
from tba.searcher.engines.engine import Generation, LoadReport, Mismatch, SamplingSettings
from tba.tests.helpers.announcer import write_snapshot
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.engines import cpu_engine, logprobs_of

ROWS, SAMPLES = 12, 4


class SlowClient:
    """A `BufferClient` whose replies arrive `delay` polls after their requests; those to puts, `put_delay` polls."""

    address = "here"
    obstacle = ""
    unanswered_seconds = 0.0

    def __init__(self, buffer: Any, clock: ManualClock, delay: int, put_delay: int) -> None:
        self._buffer = buffer
        self._clock = clock
        self._delay = delay
        self._put_delay = put_delay
        self._posted: dict[int, tuple[int, messages.Message, Sequence[bytes]]] = {}
        self._polls = self._last_id = 0
        self.sender = f"searcher.{uuid.uuid4().hex}"
        self.secret, self.keys = b"", None
        self.puts: list[tuple[messages.PutTrajectories, Sequence[bytes]]] = []
        self.reasons: set[str] = set()
        self.heartbeats_at: list[float] = []

    @property
    def state(self) -> messages.RunState:
        return self._buffer.service.state.for_replies()

    def post(self, message: messages.Message, frames: Sequence[bytes] = ()) -> int:
        self._last_id += 1
        if isinstance(message, messages.Heartbeat):
            self.reasons.add(message.reason)
            self.heartbeats_at.append(self._clock.monotonic())
        self._posted[self._last_id] = self._polls + self._delay, message, frames
        return self._last_id

    @property
    def run(self) -> str:
        return self._buffer.run.uuid

    def encode(self, message: messages.Message, frames: Sequence[bytes] = ()) -> tuple[int, list[bytes]]:
        self._last_id += 1
        encoded = encode_request(
            message, id=self._last_id, role="searcher", sender=self.sender, run=self.run, frames=frames
        )
        return self._last_id, encoded

    def post_encoded(self, id_: int, encoded: list[bytes]) -> None:
        message = decode_request([memoryview(frame) for frame in encoded]).message
        self._posted[id_] = self._polls + self._put_delay, message, encoded[1:]
        self.puts.append((message, encoded[1:]))  # type: ignore[arg-type]

    def is_pending(self, id_: int | None) -> bool:
        return id_ in self._posted

    def poll(self, timeout_seconds: float) -> list[Any]:
        self._polls += 1
        self._clock.advance(timeout_seconds)
        due = [id_ for id_, (at, _, _) in self._posted.items() if at <= self._polls]
        return [self._answer(id_) for id_ in due]

    def call(self, message: messages.Message, expect: type, **_: Any) -> tuple[Any, list]:
        return self._buffer.ask(message).message, []

    def _answer(self, id_: int) -> Any:
        _, message, frames = self._posted.pop(id_)
        answer = self._buffer.ask(message, frames).message
        return SimpleNamespace(header=SimpleNamespace(id=id_), message=answer)


class Agent:
    """In place of the endpoint: asks for one response after another."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.closed = self.generating = 0

    def step(self, ask: Any, version: int | None, rows: int) -> int:
        if version is not None and not self.generating:
            ask(np.array([5, 13, 6, 15], np.int32), SamplingSettings(1.0, 1.0, 20), self._take)
            self.generating = 1
        return self.generating

    def _take(self, generation: Generation) -> None:
        self.answers.append(len(generation.response_ids))
        self.generating = 0

    def close(self) -> None:
        self.closed += 1


class Watched:
    """An engine that records the number of its requests at each step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.in_flight_at_steps: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Any]:
        self.in_flight_at_steps.append(self._engine.in_flight)
        return self._engine.step()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a random model of the arithmetic task. Responses end after 16 tokens on average, some after 2 or 60."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tba.tests.conftest import EXAMPLE_MODEL

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("models") / "random"
    shutil.copytree(EXAMPLE_MODEL, directory)
    config = LlamaConfig.from_pretrained(
        directory, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def problems() -> Any:
    """The task, which takes long to make."""
    from tba.searcher.tasks import load_task

    return load_task(TaskSection(limit=200))


@pytest.fixture
def search(harness, model: Path, problems: Any, tmp_path: Path) -> Callable[..., tuple[Watched, SlowClient]]:
    """Run a searcher for a number of iterations of its loop."""
    from tba.common.rendering import PromptRenderer
    from tba.common.weights.model_files import eos_ids
    from tba.common.weights.pretrained import load_tokenizer
    from tba.searcher.build import LoadedTask
    from tba.searcher.engines.stopping import Stopping
    from tba.searcher.loop import Searcher
    from tba.searcher.pipeline import Exploration
    from tba.searcher.scoring.rewards import Rewards

    def run(
        *,
        steps: int,
        delay: int = 1,
        put_delay: int | None = None,
        rows: int = ROWS,
        neighbour: str = "",
        finished: bool = False,
        template: str = "",
        task: dict[str, Any] | None = None,
        endpoint: Any = None,
        **keys: Any,
    ) -> tuple[Watched, SlowClient]:
        search = {
            "engine": "transformers", "samples_per_prompt": SAMPLES, "max_in_flight": rows, "max_tokens": 60,
            "spool_dir": str(tmp_path / "spool"),
        } | keys  # fmt: skip
        sampling = {"replacement": "never"} if keys.get("put") == "sample" else {}
        buffer = harness(search=search, buffer=sampling, task={"limit": 200, "reward_workers": 0} | (task or {}))
        if neighbour:
            beat = messages.Heartbeat(activity="waiting", reason="", weights_version=None, metrics={}, serves=neighbour)
            buffer.ask(beat, sender="other.1")
        clock = ManualClock()
        client: Any = SlowClient(buffer, clock, delay, put_delay or delay)
        config = buffer.config
        renderer = PromptRenderer(load_tokenizer(model), config.task)
        renderer.tokenizer.chat_template = template
        stopping = Stopping(renderer.tokenizer, config.search.stop, eos_ids(model))
        engine = cpu_engine(model, max_in_flight=rows, seed=steps, stopping=stopping)
        announce(buffer, model, tmp_path)
        if finished:
            buffer.ask(messages.FinishRun(step=0), role="trainer", sender="t.1")
        watched = Watched(engine)
        searcher = Searcher(
            buffer.config.model_copy(update={"run": config.run.model_copy(update={"name": "test"})}),
            engine=watched, loaded=LoadedTask(problems, renderer, stopping), rewards=Rewards(problems, config.task),
            exploration=Exploration(config.search, run_seed=config.run.seed, searcher="s"),
            client=client, clock=clock,
        )  # fmt: skip
        left = iter(range(steps))
        # Iterations count from the first weights on, which another thread prepares.
        searcher.run(lambda: searcher._weights.current is not None and next(left, None) is None, endpoint)
        searcher.close()
        return watched, client

    return run


def announce(buffer: Any, model: Path, root: Path) -> None:
    """Publish the weights of the model as version 0."""
    final, digest = write_snapshot(model, Path(tempfile.mkdtemp(dir=root)), 0)
    ref = messages.WeightsRef(version=0, step=0, path=str(final), manifest_sha256=digest)
    buffer.ask(messages.AnnounceSnapshot(weights=ref, bytes=1), role="publisher", sender="pub.1")


@pytest.mark.slow
def test_a_searcher_that_serves_snapshots_learns_before_its_first_fetch_which_nodes_to_ask(search, monkeypatch):
    from tba.searcher.weights.follower import WeightsFollower

    asked = []
    monkeypatch.setattr(WeightsFollower, "ask", lambda self, nodes: asked.append((self.current, nodes)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        search(steps=3, neighbour="tcp://other:5759", serve_snapshots=address)
    # The node's address is taken, as by another searcher of this node: that one serves.
    assert asked[0] == (None, ["tcp://other:5759"])
    asked.clear()
    search(steps=3, neighbour="tcp://other:5759", serve_snapshots=address)
    assert asked[0] == (None, ["tcp://other:5759"])
    # It no longer listens.
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        pass


@pytest.mark.slow
def test_a_searcher_that_joins_a_finished_run_says_so_asks_for_no_weights_and_leaves(search, monkeypatch):
    from tba.searcher.weights.follower import WeightsFollower

    wanted = []
    update = WeightsFollower.update
    monkeypatch.setattr(WeightsFollower, "update", lambda self, ref: wanted.append(ref) or update(self, ref))
    # It leaves although `stop` is never true.
    engine, client = search(steps=1, finished=True)
    assert set(wanted) == {None}
    assert client.reasons == {"the run is finished: ends after 60 s unless a trainer resumes it"}
    assert engine.in_flight_at_steps == client.puts == []


@pytest.mark.slow
@pytest.mark.parametrize("delay", [1, 4])
def test_every_row_of_the_engine_is_busy_and_a_group_is_put_when_it_is_complete_also_with_a_slow_buffer(search, delay):
    """A reply takes up to a quarter of the 16 steps of an average response."""
    engine, client = search(steps=400, delay=delay)
    lengths = {n for message, _ in client.puts for n in message.rows.response_ids_count}
    assert len(lengths) > 20
    full = next(step for step, count in enumerate(engine.in_flight_at_steps) if count >= ROWS)
    assert full <= 2 * delay + 2
    assert min(engine.in_flight_at_steps[full:]) >= ROWS
    assert max(engine.in_flight_at_steps) < 3 * ROWS
    # Although older ones are not complete.
    leases = [message.rows.lease[0] for message, _ in client.puts]
    assert leases != sorted(leases)
    assert all(len(message.rows.prompt_key) == SAMPLES for message, _ in client.puts)


@pytest.mark.slow
def test_single_responses_are_put_as_they_end_and_the_last_one_closes_their_visit(search):
    _, client = search(steps=200, put="sample")
    puts = [(message.rows.lease, message.closes) for message, _ in client.puts]
    assert all(len(leases) == 1 for leases, _ in puts)
    of_visit: dict[int, list[bool]] = {}
    for (lease,), closes in puts:
        of_visit.setdefault(lease, []).append(closes)
    whole = [closes for closes in of_visit.values() if closes[-1]]
    assert len(whole) > 20
    assert all(closes == [False] * (SAMPLES - 1) + [True] for closes in whole)
    assert all(len(closes) < SAMPLES for closes in of_visit.values() if not closes[-1])
    # Responses to different prompts end in between.
    assert [leases for leases, _ in puts] != sorted(leases for leases, _ in puts)
    visits = client._buffer.store.database.all("SELECT id, done_at IS NOT NULL FROM visits")
    stored = {id_ for id_, closes in of_visit.items() if closes[-1]}
    assert {id_ for id_, done in visits if done} <= stored
    assert len(stored) - sum(done for _, done in visits) <= 1


@pytest.mark.slow
def test_generation_pauses_when_the_spool_is_full(search):
    engine, client = search(steps=600, put_delay=10**9, spool_mib=0.02)
    assert len(engine.in_flight_at_steps) < 600 / 2
    # A put takes a block of the disk, however small it is.
    assert 5 <= len(client.puts) <= 5 + ROWS // SAMPLES


@pytest.mark.slow
def test_requests_are_answered_while_generation_pauses_and_take_no_row_of_the_run(search):
    agent = Agent()
    _, client = search(steps=600, put_delay=10**9, spool_mib=0.02, endpoint=agent)
    assert len(agent.answers) > 30
    assert len(client.puts) <= 5 + 6 * ROWS // SAMPLES
    assert agent.closed
    agent = Agent()
    engine, client = search(steps=400, endpoint=agent)
    full = next(step for step, count in enumerate(engine.in_flight_at_steps) if count > ROWS)
    # The run's own responses fill the engine besides.
    assert min(engine.in_flight_at_steps[full:]) > ROWS
    assert len(client.puts) > len(agent.answers) / 4 > 0


@pytest.mark.slow
def test_a_trajectory_records_the_settings_it_was_sampled_with(search, model):
    """The log-probabilities are those of the sampling distribution, so they show which settings were used."""
    from transformers import AutoModelForCausalLM

    _, client = search(steps=80, temperature=[0.5, 1.0, 2.0])
    reference = AutoModelForCausalLM.from_pretrained(model)
    seen = set()
    for message, frames in client.puts:
        rows = message.rows
        arrays = unpack_arrays(asdict(rows), [memoryview(frame) for frame in frames])
        for prompt, response, logprobs, sampling in zip(
            arrays["prompt_ids"], arrays["response_ids"], arrays["logprobs"], rows.sampling, strict=True
        ):
            expected = logprobs_of(reference, prompt, response, sampling.temperature)
            np.testing.assert_allclose(logprobs, expected, atol=1e-4)
            seen.add(sampling.temperature)
    assert seen == {0.5, 1.0, 2.0}


@pytest.mark.slow
def test_a_chat_prompt_with_stop_strings_is_trained_on_with_what_ended_it_and_scored_without(search, model):
    from tba.common.weights.pretrained import load_tokenizer

    template = "+{% for m in messages %}{{ m.content }}{% endfor %}-"
    _, client = search(
        steps=150, template=template, task={"template": "chat", "truncated": -0.5}, stop=["12", "3"], max_tokens=12
    )
    tokenizer, ended = load_tokenizer(model), set()
    for message, frames in client.puts:
        rows = message.rows
        arrays = unpack_arrays(asdict(rows), [memoryview(frame) for frame in frames])
        for n, key in enumerate(rows.prompt_key):
            assert arrays["prompt_ids"][n].tolist() == tokenizer.encode(f"+{key}=-", add_special_tokens=False)
            # Of the special tokens, only the end token is of interest.
            response = re.sub("<(pad|unk)>", "", tokenizer.decode(arrays["response_ids"][n].tolist()))
            found = next((end for end in ("12", "3", "<eos>") if response.endswith(end)), None)
            ended.add(found)
            assert rows.text[n] == response.removesuffix(found or "")
            assert not any(end in rows.text[n] for end in ("12", "3", "<eos>"))
            assert rows.stop_reason[n] == ("eos" if found else "length")
            assert rows.reward[n] == (-0.5 if found is None else float(rows.text[n] == str(eval(key))))
    assert ended == {"12", "3", "<eos>", None}
    with closing(sqlite3.connect(client._buffer.store.path)) as database, database:
        key, text = database.execute("SELECT key, text FROM prompts ORDER BY position").fetchone()
    assert text == f"+{key}=-"


@pytest.fixture
def slow_polls(monkeypatch):
    """Let a tenth of a second pass at each poll, also while the engine is busy."""
    poll = SlowClient.poll

    def slow_poll(client: SlowClient, timeout_seconds: float) -> list[Any]:
        client._clock.advance(0.1)
        return poll(client, timeout_seconds)

    monkeypatch.setattr(SlowClient, "poll", slow_poll)


@pytest.mark.parametrize("seconds", [1, 3])
def test_a_searcher_sends_heartbeats_as_often_as_the_buffer_asks(search, monkeypatch, slow_polls, seconds):
    monkeypatch.setattr(Clients, "heartbeat_seconds", seconds)
    _, client = search(steps=100)
    gaps = np.diff(client.heartbeats_at)
    assert len(gaps) >= 2
    assert gaps == pytest.approx(np.full(len(gaps), seconds), abs=0.2)


def test_every_metric_of_a_heartbeat_has_a_name_at_prometheus_or_is_a_rate(search, slow_polls):
    _, client = search(steps=100)
    shown = {name for one in client._buffer.service.status().clients for name in one.metrics}
    swap = LoadReport(Mismatch(0.0, 0.0, 0.0), "", 0.0, 0.0, 0.0, 0.0)
    assert {name for name in shown | set(swap.metrics()) if name not in SEARCHER_NAMES} == {
        "tokens_per_second",
        "trajectories_per_second",
    }
