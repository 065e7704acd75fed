"""The searcher's loop: follow the weights, lease prompts, step the engine, hand over complete groups.

The engine never waits for the buffer: requests are posted and their replies taken when they come. While
the buffer is away, the prompts that are leased already are answered, then prompts of the searcher's own
choice, into the spool; when that is full, generation pauses. The engine never drains: its queue holds
another load of requests.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tba
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.clock import Clock
from tba.common.codec import Reply
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, ConfigError, Refused
from tba.common.log import get_logger
from tba.common.process import notify_systemd
from tba.common.quantity import quantity
from tba.searcher.delivery import Delivery
from tba.searcher.engine import Engine
from tba.searcher.exploration import Exploration
from tba.searcher.groups import Group, GroupBuilder, Tokenizer
from tba.searcher.prefetch import Prefetcher
from tba.searcher.references import References
from tba.searcher.rewards import Rewards
from tba.searcher.tasks.task import Prompt, Task, fingerprint
from tba.searcher.unleased import UnleasedPrompts
from tba.searcher.weights import WeightsFollower

log = get_logger(__name__)

_HEARTBEAT_SECONDS = 1.0
_LEASE_WAIT_SECONDS = 1.0
_IDLE_SECONDS = 0.05
_SCORE_WAIT_SECONDS = 0.01
_DRAIN_SECONDS = 5.0
_TAKE_UP_SECONDS = 60.0
_REGISTER_CHUNK = 10_000
_REFILLS = 8  # prompts are leased when an eighth of the two loads is used up


@dataclass(slots=True)
class _Rates:
    """Counters at the last heartbeat, to tell rates from."""

    at: float
    tokens: int = 0
    trajectories: int = 0


class Searcher:
    """One engine, one connection to the buffer. `run` returns when the run is finished or `stop()`."""

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        task: Task,
        rewards: Rewards,
        references: References,
        tokenizer: Tokenizer,
        exploration: Exploration,
        client: BufferClient,
        clock: Clock,
    ) -> None:
        self._config = config
        self._engine = engine
        self._task = task
        self._rewards = rewards
        self._references = references
        self._client = client
        self._clock = clock
        self._weights = WeightsFollower(engine, clock, Prefetcher(config, clock))
        self._groups = GroupBuilder(
            engine, task, rewards, tokenizer, exploration, samples=config.search.samples_per_prompt
        )
        self._delivery = Delivery(
            client, run_name=config.run.name, root=config.spool, limit_mib=config.search.spool_mib, clock=clock
        )
        self._unleased = UnleasedPrompts(task.prompts(), config, client.sender)
        self._held: set[int] = set()  # leases of groups that are being generated
        self._lease_request: int | None = None
        self._heartbeat_request: int | None = None
        self._wait_reason = ""
        self._lease_at = 0.0  # monotonic; not before this
        self._seen_running = False
        self._joined_at = clock.monotonic()
        self._rates = _Rates(clock.monotonic())

    def run(self, stop: Callable[[], bool]) -> None:
        """Search until the run is finished or `stop()`; then hand over what is complete.

        Raises Refused if the buffer will not have this searcher.
        """
        self._join(stop)
        while not (stop() or self._finished):
            self._weights.follow(self._client.state.weights if self._client.state else None)
            self._ask_for_prompts()
            generating = self._engine.in_flight and not self._delivery.pause
            for generation in self._engine.step() if generating else ():
                self._hand_over(self._groups.finish(generation))
            self._take_scores(0.0 if generating else _SCORE_WAIT_SECONDS)
            self._deliver(self._references.done())
            self._take_replies(0.0 if generating or self._rewards.waiting else _IDLE_SECONDS)
            self._heartbeat()
        self._leave()

    def close(self) -> None:
        """Let go of the weights' files and end the thread that prepares them."""
        self._weights.close()

    @property
    def _finished(self) -> bool:
        """The run is over; one that was over when we joined is given time to be taken up by a trainer."""
        if self._client.state is None or not self._client.state.finished:
            self._seen_running = True
            return False
        return self._seen_running or self._clock.monotonic() - self._joined_at > _TAKE_UP_SECONDS

    def _join(self, stop: Callable[[], bool]) -> None:
        hello = wire.Hello(host=socket.gethostname(), pid=os.getpid(), software=f"tba {tba.__version__}")
        try:
            welcome, _ = self._client.ask(hello, wire.Welcome, stop)
            if welcome.run_name != self._config.run.name:
                raise ConfigError(
                    f"the buffer at {self._client.address} serves run {welcome.run_name}, this configuration is of "
                    f"run {self._config.run.name}"
                )
            register_prompts(self._client, self._task, stop)
            self._delivery.open()
        except BufferUnavailable:  # raised only when asked to stop
            return
        self._joined_at, self._seen_running = self._clock.monotonic(), False
        log.info("joined", buffer=self._client.address, prompts=len(self._task.prompts()))
        notify_systemd("READY=1")

    def _take_scores(self, timeout_seconds: float) -> None:
        for scored in self._rewards.wait(timeout_seconds if self._rewards.waiting else 0.0):
            self._hand_over(self._groups.scored(scored))

    def _ask_for_prompts(self) -> None:
        """Keep two loads of requests: one in the engine, and one that waits for places in it.

        Counted in requests, not in groups: of a group whose last response is long, the other places are free. What
        waits for its reward or its reference counts too, so that one that is slow holds generation back.
        """
        if self._weights.current is None or self._delivery.pause:
            return
        samples = self._config.search.samples_per_prompt
        target = 2 * max(self._config.search.max_in_flight, samples)
        want = -(-(target - self._engine.in_flight - self._unscored) // samples)
        # Few larger requests rather than one for each group that is complete.
        if want < max(1, target // samples // _REFILLS):
            return
        if self._delivery.away:
            self._start(self._unleased.take(want))
        if self._lease_request is not None or self._clock.monotonic() < self._lease_at:
            return
        held = sorted({*self._held, *self._delivery.leases})
        want = min(want, wire.MAX_ROWS - len(held))
        if want <= 0:
            return
        request = wire.LeasePrompts(
            want=want,
            held=held,
            weights_version=self._weights.current.version,
            wait_seconds=_LEASE_WAIT_SECONDS,
        )
        self._lease_request = self._client.post(request)

    def _take_replies(self, timeout_seconds: float) -> None:
        for reply in self._client.poll(timeout_seconds):
            if isinstance(reply.message, wire.Failure):
                raise Refused(reply.message.code, reply.message.message)
            if reply.header.id == self._lease_request:
                self._take_leases(reply)
            elif isinstance(reply.message, wire.PutAck):
                self._delivery.take(reply)
        self._delivery.turn()

    def _take_leases(self, reply: Reply) -> None:
        self._lease_request = None
        assert isinstance(reply.message, wire.Leases)
        self._wait_reason = reply.message.reason
        if not reply.message.visits:
            self._lease_at = self._clock.monotonic() + _IDLE_SECONDS
        known = {*self._held, *self._delivery.leases}
        self._start([visit for visit in reply.message.visits if visit.lease not in known])

    def _start(self, visits: Sequence[wire.Visit]) -> None:
        for visit in visits:
            if visit.lease != wire.NO_VISIT:
                self._held.add(visit.lease)
            self._hand_over(self._groups.start(visit))

    def _hand_over(self, group: Group | None) -> None:
        """A complete group lacks its reference log-probabilities only."""
        if group is not None:
            self._references.submit(group)

    def _deliver(self, groups: Sequence[Group]) -> None:
        """They are the delivery's from now on."""
        for group in groups:
            self._held.discard(group.visit.lease)
            self._delivery.put(group.done, group.visit.lease)

    @property
    def _unscored(self) -> int:
        return self._rewards.waiting + self._references.waiting

    def _heartbeat(self) -> None:
        now = self._clock.monotonic()
        if now - self._rates.at < _HEARTBEAT_SECONDS:
            return
        activity, reason = self._activity()
        metrics = self._metrics(now)
        current = self._weights.current
        heartbeat = wire.Heartbeat(
            activity=activity,
            reason=reason,
            weights_version=current.version if current else None,
            metrics=metrics,
        )
        if not self._client.is_pending(self._heartbeat_request):
            self._heartbeat_request = self._client.post(heartbeat)
        notify_systemd(f"STATUS={activity} {reason} {metrics['tokens_per_second']:.0f} tokens/s".strip())
        self._rates = _Rates(now, self._groups.tokens, self._groups.trajectories)

    def _activity(self) -> tuple[str, str]:
        if self._weights.current is None:
            return "waiting", self._weights.trouble or "no snapshot is published yet"
        if self._delivery.pause:
            return "waiting", self._delivery.pause
        if self._unscored and not self._engine.in_flight:
            return "waiting", f"{quantity(self._unscored, 'response is', 'responses are')} being scored"
        if self._delivery.groups and not self._engine.in_flight:
            return "waiting", f"the buffer has not acknowledged {quantity(self._delivery.groups, 'group')}"
        if not self._engine.in_flight:
            return "waiting", self._weights.trouble or self._wait_reason or "prompts"
        return "generating", self._weights.trouble

    def _metrics(self, now: float) -> dict[str, float]:
        seconds = max(now - self._rates.at, 1e-9)
        return {
            "tokens_per_second": (self._groups.tokens - self._rates.tokens) / seconds,
            "trajectories_per_second": (self._groups.trajectories - self._rates.trajectories) / seconds,
            "in_flight": float(self._engine.in_flight),
            **self._delivery.metrics,
            "errors": float(self._groups.errors),
            "rewards_waiting": float(self._rewards.waiting),
            "reward_seconds": self._rewards.latency_seconds,
            "reward_errors": float(self._rewards.errors),
            "reward_timeouts": float(self._rewards.timeouts),
            "references_waiting": float(self._references.waiting),
            "reference_errors": float(self._references.errors),
            "weights_load_seconds": self._weights.last_load_seconds,
            "weights_prepare_seconds": self._weights.last_prepare_seconds,
            "weights_refusals": float(self._weights.refusals),
            **(self._weights.report.metrics() if self._weights.report else {}),
        }

    def _leave(self) -> None:
        """Wait a little for the acknowledgements, then give back what is not done."""
        deadline = self._clock.monotonic() + _DRAIN_SECONDS
        while (self._unscored or not self._delivery.is_done) and self._clock.monotonic() < deadline:
            self._take_scores(_SCORE_WAIT_SECONDS)
            self._deliver(self._references.done())
            self._take_replies(_IDLE_SECONDS)
        self._deliver(self._references.close())
        if self._rewards.waiting:
            log.warning("responses dropped: their rewards did not come in time", responses=self._rewards.waiting)
        self._delivery.close()
        try:
            self._client.call(wire.Goodbye(), wire.Done, deadline_seconds=1.0)
        except BufferUnavailable as error:
            log.warning("left without goodbye", reason=str(error))
        log.info("left", rows=self._delivery.rows, errors=self._groups.errors)


def register_prompts(client: BufferClient, task: Task, stop: Callable[[], bool]) -> None:
    """Tell the buffer the prompt keys, unless it knows them. Raises Refused if it knows others."""
    prompts = task.prompts()
    digest = fingerprint(prompts)
    for offset in range(0, len(prompts), _REGISTER_CHUNK):
        message = _registration(task, digest, prompts, offset)
        registered, _ = client.ask(message, wire.Registered, stop)
        if registered.complete:
            return


def _registration(task: Task, digest: str, prompts: Sequence[Prompt], offset: int) -> wire.RegisterPrompts:
    keys = [prompt.key for prompt in prompts[offset : offset + _REGISTER_CHUNK]]
    return wire.RegisterPrompts(task=task.name, fingerprint=digest, total=len(prompts), offset=offset, keys=keys)
