"""A searcher: its start from a configuration, and its loop.

The loop polls for weights, leases prompts, moves the pipeline on, and exchanges messages with the buffer.

The engine never waits for the buffer: requests are posted, and replies are taken when they arrive. While the buffer is
away, the searcher answers the prompts it has leased, then prompts of its own choice, into the spool; when the spool is
full, generation pauses. The engine's batch never runs empty meanwhile: another load of requests is queued behind it.
"""

import contextlib
import errno
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tba.common.clock import Clock, SystemClock
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, Refused, quantity
from tba.common.log import get_logger
from tba.common.rendering import PromptRenderer
from tba.common.run_identity import refuse_other_server
from tba.common.run_snapshots import weights_directory
from tba.common.system.devices import CPU
from tba.common.system.process import StopSignal, extend_start, give_way, notify_systemd
from tba.common.system.watchdog import Watchdog
from tba.common.weights.node_store import clear, make_directory
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient, make_hello
from tba.common.wire.codec import Reply
from tba.common.wire.keys import buffer_client_keys
from tba.searcher import build
from tba.searcher.delivery.delivery import Delivery
from tba.searcher.endpoint import Completions, Endpoint
from tba.searcher.engines.engine import Engine
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.pipeline import Exploration, GenerationStage, Pipeline, ScoringStage
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks.task import Prompt, Task, check_prompts, fingerprint
from tba.searcher.weights.fetch import Serving
from tba.searcher.weights.follower import FixedWeights, WeightsFollower

log = get_logger(__name__)

# In times between heartbeats. The buffer answers as soon as there is room or newer weights.
LEASE_WAIT_HEARTBEATS = 5.0
_IDLE_SECONDS = 0.05
_SCORE_WAIT_SECONDS = 0.01
_DRAIN_SECONDS = 5.0
# Prompts are leased when an eighth of the two loads is used up.
_REFILLS = 8
_REGISTER_CHUNK = 10_000
# Characters of the texts in one message, which must fit a header also if each takes four bytes.
_REGISTER_CHARACTERS = 1 << 20
# Between two questions of a searcher whose prompts another one registers.
_WAIT_SECONDS = 0.2
# At most, for the searchers of a machine.
ENDPOINT_PORTS = 64
# How long a process that joins a finished run waits for a trainer that resumes it.
_RESUME_SECONDS = 60.0


def search(config: Config, *, device: str, label: str, stop: StopSignal) -> None:
    """Generate until the run is finished or `stop()`. `device` is `cpu` or the visible `cuda`.

    `label` distinguishes the searchers of this machine: `cpu0`, `gpu3`, `gpu0-1`, or the UUID of a GPU.

    Raises ConfigError for a model or task that cannot be loaded, WorkerLost if loading a reward model or a task failed
    for a reason that may be transient, and Refused if the buffer rejects this searcher.
    """
    log.info("starting", model=config.model.path, engine=config.search.engine, buffer=config.address)
    if device == CPU == config.train.gpu:
        give_way()
    loaded = task, renderer, _ = build.load(config)
    policy = build.find_policy(config)
    check_prompts(task)
    if warning := build.check_loaded(config, loaded, task.prompts()):
        log.warning("the settings do not fit the task", reason=warning)
    # A directory that cannot be used is reported before the engine starts, which may take minutes.
    make_directory(weights_directory(config))
    clock = SystemClock()
    # The same after a restart, so that the buffer recognizes the searcher.
    name = f"{socket.gethostname()}-{label}{f'-{policy.name}' if policy else ''}"
    keys = buffer_client_keys(config.security.keys, config.address)
    client = BufferClient(config.address, role="searcher", name=name, clock=clock, keys=keys)
    with contextlib.ExitStack() as ending:
        ending.callback(_clear_weights, config, client)
        ending.callback(client.close)
        # Before the engine: workers must not inherit its threads, and it measures the memory that this leaves.
        rewards = build.make_rewards(config, task, device, stop)
        ending.callback(rewards.close)
        if stop():
            return
        # Before the engine, too: it tells that there are no weights yet.
        if (endpoint := open_endpoint(config, loaded, lambda: client.run)) is not None:
            ending.callback(endpoint.close)
        extend_start()
        # Starting the engine may take minutes, and there is nothing to finish yet.
        with stop.exits_immediately():
            own, tokens = config, build.mean_tokens(task.prompts(), renderer)
            if policy is not None:
                own = build.served(config, policy)
            engine = build.make_engine(own, loaded.stopping, device, name, prompt_tokens=tokens, kept=config.needs_kept)
            ending.callback(engine.close)
        exploration = Exploration(config.search, run_seed=config.run.seed, searcher=name)
        searcher = Searcher(config, engine, loaded, rewards, exploration, client, clock)
        ending.callback(searcher.close)
        searcher.run(stop, endpoint)


def open_endpoint(config: Config, loaded: build.LoadedTask, run: Callable[[], str]) -> Endpoint | None:
    """Open the endpoint of a searcher at the first free port from that of `search.serve` on.

    With port 0 it is any free one. None without `search.serve`, or if it cannot be bound. `run` returns the run's uuid.
    """
    if not config.search.serve:
        return None
    host, port = config.search.serve_address
    token = config.search.serve_token.get_secret_value()
    completions = Completions(config, loaded.renderer, loaded.stopping, build.context_of(config), run)
    last = min(port + ENDPOINT_PORTS, 1 << 16) - 1 if port else 0
    endpoint = None
    while endpoint is None:
        try:
            endpoint = Endpoint(host, port, token=token, completions=completions)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port >= last:
                log.warning("no endpoint", host=host, port=port, reason=str(error))
                return None
            port += 1
    log.info("endpoint", url=endpoint.url)
    return endpoint


def _clear_weights(config: Config, client: BufferClient) -> None:
    """Delete the node's cached weights if the run is finished. Other searchers of the node keep theirs pinned."""
    if client.state is not None and client.state.finished:
        clear(weights_directory(config))


class Searcher:
    """One engine, one connection to the buffer. `run` returns when the run is finished or `stop()`."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        loaded: build.LoadedTask,
        rewards: Rewards,
        exploration: Exploration,
        client: BufferClient,
        clock: Clock,
    ) -> None:
        self._config, self._engine, self._rewards, self._client, self._clock = config, engine, rewards, client, clock
        task, renderer, stopping = self._loaded = loaded
        self._endpoint: Endpoint | None = None
        # Responses to requests of the endpoint that the engine generates.
        self._asked = 0
        self._serving = Serving(config, clock)
        self._weights = (FixedWeights if config.search.policy else WeightsFollower)(config, engine, clock)
        self._delivery = Delivery(client, config.run.name, root=config.spool, limit_mib=config.search.spool_mib)
        generation = GenerationStage(
            engine,
            loaded,
            task.prompts(),
            exploration.settings,
            samples=config.search.samples_per_prompt,
            metadata=lambda: self._weights.metadata,
            guide=exploration.guide,
            context=build.context_of(config) if config.search.guided else None,
        )
        limits, version = Limits.of(config), lambda: engine.weights_version
        episodes = Episodes(generation.ask, rewards, renderer, stopping, limits, version)
        phases, singly = config.task.phases, config.search.put == "sample"
        self._scoring = ScoringStage(rewards, stopping, config.task.truncated, episodes, phases=phases, singly=singly)
        self._pipeline = Pipeline(generation, self._scoring, self._delivery)
        self._watchdog = Watchdog(limit_seconds=config.search.step_seconds, setting="search.step_seconds")
        self._outage_prompts = outage_prompts(task.prompts(), config, client.sender)
        self._lease_request: int | None = None
        self._heartbeat_request: int | None = None
        self._wait_reason = ""
        # Monotonic time before which no lease is requested.
        self._lease_at = 0.0
        self._run = RunEnd(client, clock)
        # Monotonic time of the last heartbeat, and the tokens and trajectories by then, for rates.
        self._last = clock.monotonic(), 0, 0

    def run(self, stop: Callable[[], bool], endpoint: Endpoint | None = None) -> None:
        """Search until the run is finished or `stop()`, then deliver what is complete. Raises Refused."""
        self._endpoint = endpoint
        self._join(stop)
        self._watchdog.start()
        while not (stop() or self._run.is_over):
            self._watchdog.beat(warm=self._scoring.trajectories > 0)
            # Those of a finished run may be deleted already; a trainer that resumes it publishes others.
            state = None if self._run.finished else self._client.state
            self._weights.update(state.weights if state else None)
            self._lease_prompts()
            self._asked = self._answer()
            generate = self._pipeline.generating and (self._asked > 0 or not self._delivery.pause)
            self._pipeline.step(generate=generate, wait_seconds=0.0 if generate else _SCORE_WAIT_SECONDS)
            self._exchange(0.0 if generate or self._rewards.waiting else _IDLE_SECONDS)
            self._heartbeat()
        self._watchdog.stop()
        if endpoint is not None:
            endpoint.close()
        self._leave()

    def close(self) -> None:
        self._watchdog.stop()
        self._serving.close()
        self._weights.close()

    def _join(self, stop: Callable[[], bool]) -> None:
        try:
            welcome, _ = self._client.call(make_hello(self._config.run.name), messages.Welcome, stop=stop)
            refuse_other_server(self._client.address, welcome.run_name, self._config.run.name)
            register_prompts(self._client, self._loaded.task, self._loaded.renderer, stop)
            self._delivery.open()
            self._serving.update()
            # Which nodes to ask for snapshots: the first one is fetched whole.
            if self._serving.address:
                heartbeat = messages.Heartbeat(
                    activity="connected", reason="", weights_version=None, metrics={}, serves=self._serving.address
                )
                sources, _ = self._client.call(heartbeat, messages.Sources, stop=stop)
                self._weights.ask(sources.addresses)
        # Raised only after `stop()`.
        except BufferUnavailable:
            return
        self._run.joined()
        log.info("joined", buffer=self._client.address, prompts=len(self._loaded.task.prompts()))
        if self._run.finished:
            log.info("run is finished", waits_for="a trainer that resumes it", at_most_seconds=_RESUME_SECONDS)
        notify_systemd("READY=1")

    def _answer(self) -> int:
        """Start requests of the endpoint, also while generation pauses; returns how many are being generated."""
        if self._endpoint is None:
            return 0
        version = self._weights.current.version if self._weights.current is not None else None
        return self._endpoint.step(self._pipeline.generation.ask, version, -(-self._engine.max_in_flight // 2))

    def _lease_prompts(self) -> None:
        """Keep two loads of requests: one in the engine, and one that is queued behind it.

        The loads are counted in requests, not in groups: while a group's longest response is being generated, the rows
        of its other responses are free. Responses that wait for a reward count as well, so that a slow scorer holds
        generation back instead of piling up work.
        """
        current = self._weights.current
        if current is None or self._delivery.pause:
            return
        samples = self._config.search.samples_per_prompt
        target = 2 * max(self._engine.max_in_flight, samples)
        want = -(-(target - (self._engine.in_flight - self._asked) - self._rewards.waiting) // samples)
        # Few larger requests rather than one for each group that completes.
        if want < max(1, target // samples // _REFILLS):
            return
        if self._delivery.away:
            self._pipeline.submit(islice(self._outage_prompts, want))
        if self._lease_request is not None or self._clock.monotonic() < self._lease_at:
            return
        held = sorted(self._pipeline.leases)
        want = min(want, fields.MAX_LEASES - len(held))
        if want <= 0:
            return
        wait = LEASE_WAIT_HEARTBEATS * self._heartbeat_seconds
        request = messages.LeasePrompts(want=want, held=held, weights_version=current.version, wait_seconds=wait)
        self._lease_request = self._client.post(request)

    def _exchange(self, timeout_seconds: float) -> None:
        """Handle the replies that have arrived, then post what the delivery has room for."""
        for reply in self._client.poll(timeout_seconds):
            if isinstance(reply.message, messages.Failure):
                raise Refused(reply.message.code, reply.message.message)
            if reply.header.id == self._lease_request:
                self._start_leased(reply)
            elif isinstance(reply.message, messages.PutAck):
                self._delivery.acknowledge(reply)
            elif isinstance(reply.message, messages.Sources):
                self._weights.ask(reply.message.addresses)
        self._delivery.step()

    def _start_leased(self, reply: Reply) -> None:
        self._lease_request = None
        assert isinstance(reply.message, messages.Leases)
        self._wait_reason = reply.message.reason
        if not reply.message.visits:
            self._lease_at = self._clock.monotonic() + _IDLE_SECONDS
        # A repeated request is granted the same visits again.
        known = self._pipeline.leases
        self._pipeline.submit([visit for visit in reply.message.visits if visit.lease not in known])

    @property
    def _heartbeat_seconds(self) -> int:
        state = self._client.state
        return state.heartbeat_seconds if state else 1

    def _heartbeat(self) -> None:
        now = self._clock.monotonic()
        if now - self._last[0] < self._heartbeat_seconds:
            return
        self._serving.update()
        activity, reason = self._activity()
        metrics = self._metrics(now)
        current = self._weights.current
        heartbeat = messages.Heartbeat(
            activity=activity,
            reason=reason[: fields.MAX_REASON],
            weights_version=current.version if current else None,
            metrics=metrics,
            serves=self._serving.address,
        )
        if not self._client.is_pending(self._heartbeat_request):
            self._heartbeat_request = self._client.post(heartbeat)
        notify_systemd(f"STATUS={activity} {reason} {metrics['tokens_per_second']:.0f} tokens/s".strip())
        self._last = now, self._scoring.tokens, self._scoring.trajectories

    def _activity(self) -> tuple[str, str]:
        if self._weights.current is None:
            over = f"the run is finished: ends after {_RESUME_SECONDS:.0f} s unless a trainer resumes it"
            return "waiting", over if self._run.finished else self._weights.reason or "no snapshot is published yet"
        if self._delivery.pause:
            return "waiting", self._delivery.pause
        if self._rewards.waiting and not self._engine.in_flight:
            return "waiting", f"{quantity(self._rewards.waiting, 'response is', 'responses are')} being scored"
        if self._delivery.puts and not self._engine.in_flight:
            return "waiting", f"the buffer has not acknowledged {quantity(self._delivery.puts, 'put')}"
        if not self._engine.in_flight:
            return "waiting", self._weights.reason or self._wait_reason or "prompts"
        return "generating", self._weights.reason

    def _metrics(self, now: float) -> dict[str, float]:
        since, tokens, trajectories = self._last
        refused = self._weights.refused_version
        seconds = max(now - since, 1e-9)
        return {
            "tokens": float(self._scoring.tokens),
            "trajectories": float(self._scoring.trajectories),
            "tokens_per_second": (self._scoring.tokens - tokens) / seconds,
            "trajectories_per_second": (self._scoring.trajectories - trajectories) / seconds,
            "in_flight": float(self._engine.in_flight),
            **self._engine.metrics,
            **self._delivery.metrics,
            "errors": float(self._scoring.errors),
            "rewards_waiting": float(self._rewards.waiting),
            "reward_seconds": self._rewards.latency_seconds,
            "reward_errors": float(self._rewards.errors),
            "reward_timeouts": float(self._rewards.timeouts),
            "weights_load_seconds": self._weights.last_load_seconds,
            "weights_prepare_seconds": self._weights.last_prepare_seconds,
            "weights_refusals": float(self._weights.refusals),
            **({"refused_version": float(refused)} if refused is not None else {}),
            **(self._weights.report.metrics() if self._weights.report else {}),
        }

    def _leave(self) -> None:
        """Wait a few seconds for scores and acknowledgements, then release the leases of everything else."""
        deadline = self._clock.monotonic() + _DRAIN_SECONDS
        while (self._rewards.waiting or not self._delivery.is_done) and self._clock.monotonic() < deadline:
            self._pipeline.step(generate=False, wait_seconds=_SCORE_WAIT_SECONDS)
            self._exchange(_IDLE_SECONDS)
        if self._rewards.waiting:
            log.warning("responses dropped: their rewards did not come in time", responses=self._rewards.waiting)
        self._delivery.close()
        try:
            self._client.call(messages.Goodbye(), messages.Done, deadline_seconds=1.0)
        except BufferUnavailable as error:
            log.warning("left without goodbye", reason=str(error))
        reason = "the run is finished" if self._run.finished else "stopped"
        log.info("left", rows=self._delivery.rows, errors=self._scoring.errors, reason=reason)


def register_prompts(client: BufferClient, task: Task, renderer: PromptRenderer, stop: Callable[[], bool]) -> None:
    """Send keys, rendered texts and answers of the prompts that the buffer lacks, unless another searcher does.

    Raises Refused if it has others, or another searcher renders them differently; BufferUnavailable after `stop()`.
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

    They become rows without a visit, which are trained on; the order of the epoch is not affected. There are none if
    the configuration limits how far searchers may run ahead: only the buffer can keep that limit.
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


@dataclass(slots=True)
class RunEnd:
    """Tells whether a run is over: it has finished, and is not one that a trainer may be about to resume."""

    client: BufferClient
    clock: Clock
    _joined_at: float = math.inf
    _seen_running: bool = False

    def joined(self) -> None:
        """Start to wait for a trainer that resumes a finished run."""
        self._joined_at, self._seen_running = self.clock.monotonic(), False

    @property
    def finished(self) -> bool:
        """Whether the run is finished, according to the last reply of the buffer."""
        return self.client.state is not None and self.client.state.finished

    @property
    def is_over(self) -> bool:
        """Whether the run is over. A run that was finished when this process joined may be resumed by a trainer."""
        if not self.finished:
            self._seen_running = True
            return False
        return self._seen_running or self.clock.monotonic() - self._joined_at > _RESUME_SECONDS
