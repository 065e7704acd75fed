"""Requests of searchers before they generate: register the prompts once, then lease as many as there is room for."""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tba.buffer.service.clients import GONE
from tba.buffer.service.run_state import ReplyBody, RunState, refuse_beyond
from tba.buffer.store.tables.prompts import OpenVisit
from tba.buffer.store.tables.runs import Task
from tba.common.config.root import check_batches
from tba.common.errors import Refused, quantity
from tba.common.wire import messages

# How long other searchers wait for the next chunk of the one that registers the prompts, which renders them.
_REGISTRATION_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Room:
    """How many prompts all searchers together may lease now, and why not more.

    `oldest_useful`: the first step whose weights are recent enough, None if any are. `target`: None without a limit on
    staleness.
    """

    prompts: int
    reason: str = ""
    oldest_useful: int | None = None
    target: int | None = None


class Leasing:
    def __init__(self, state: RunState) -> None:
        self._state = state
        # The newest version that waiting requests have been answered for.
        self._answered_version = -1
        # The searcher that registers the prompts, and until when the others leave that to it (monotonic).
        self._registrar = ("", -math.inf)

    # ------------------------------------------------------------ registration

    def register_prompts(self, message: messages.RegisterPrompts, sender: str) -> ReplyBody:
        """Add a chunk of the task's prompts. All searchers have the same ones, and one of them sends them."""
        state = self._state
        refuse_beyond("task", message.total)
        try:
            check_batches(state.config, message.total)
        except ValueError as error:
            raise Refused("too_few_prompts", f"task {message.task}: {error}") from error
        task = state.task
        if task.name is not None and (task.fingerprint, task.prompts) != (message.fingerprint, message.total):
            raise Refused(
                "other_prompts",
                f"run {state.run.name} works on {quantity(task.prompts, 'prompt')} of {task.name}; this searcher has "
                f"other data ({quantity(message.total, 'prompt')} of {message.task}) or renders it by another chat "
                "template: use the same files, and the same settings of [task], on every node",
            )
        if not self.knows(message):
            known = len(state.prompt_ids)
            new = slice(known - message.offset, None) if message.offset <= known else slice(0)
            self._refuse_repeated(message.task, message.keys[new])
            if task.name is None:
                state.task = Task(message.task, message.fingerprint, message.total)
                state.store.runs.register_task(state.run, state.task)
            state.add_prompts(message.keys[new], message.texts[new], message.answers[new])
        known = len(state.prompt_ids)
        complete = known == state.task.prompts
        wait = not complete and not self._registers(sender)
        return ReplyBody(messages.Registered(known=known, complete=complete, wait=wait))

    def _registers(self, sender: str) -> bool:
        """Whether a searcher shall send the next chunk: it sent the last one, or the one that did fell silent."""
        now = self._state.clock.monotonic()
        registrar, until = self._registrar
        if sender != registrar and now < until:
            return False
        self._registrar = (sender, now + _REGISTRATION_SECONDS)
        return True

    def knows(self, message: messages.RegisterPrompts) -> bool:
        """Whether a chunk of the registered task adds nothing, so that its reply needs no transaction.

        Prompts are added in their order: a chunk that begins after the first missing one is not added either.
        """
        known, task = len(self._state.prompt_ids), self._state.task
        is_next = message.offset <= known < message.offset + len(message.keys)
        return task.fingerprint == message.fingerprint and not is_next

    def _refuse_repeated(self, task: str, keys: Sequence[str]) -> None:
        """Raise Refused if one of these new keys stands there twice, or is registered."""
        known, times = self._state.prompt_ids, Counter(keys)
        if repeated := [key for key in keys if key in known or times[key] > 1]:
            sentence = f"two prompts of task {task} have the key {repeated[0]!r}: give every prompt its own key"
            raise Refused("repeated_prompt", sentence)

    # ------------------------------------------------------------ leases

    def lease_prompts(self, message: messages.LeasePrompts, sender: str) -> ReplyBody | None:
        """Re-grant leases whose reply was lost, hand over abandoned visits, then open new ones.

        None parks the request: there is no room, and the reply would carry no newer weights.
        """
        state = self._state
        if not state.prompt_ids or len(state.prompt_ids) < state.task.prompts:
            raise Refused("no_prompts", "the prompts of the run are not registered yet")
        if state.clients[sender].activity == GONE:
            return ReplyBody(messages.Leases(visits=[], reason="it has left"))
        # A sender that was silent for too long keeps the leases that no other sender has received since.
        for visit in (state.leases.open.get(lease) for lease in message.held):
            if visit is not None and visit.sender is None:
                self._lease_again(visit, sender)
        lost = state.leases.lost_by(sender, set(message.held))
        shared = self._room_for_all()
        room, reason = self._part_of(shared, message, sender), self._reason(shared, message)
        abandoned = state.leases.abandoned(max(0, room - len(lost)))
        for visit in abandoned:
            self._lease_again(visit, sender)
        visits = [*lost, *abandoned, *self._open_visits(room - len(lost) - len(abandoned), sender)]
        # A reply that announces newer weights must not wait for work that needs them.
        has_newest = state.newest is None or message.weights_version == state.newest.version
        if not visits and message.want and has_newest:
            state.clients[sender].held_back = reason
            return None
        guide, keys = state.curriculum.guide, state.prompt_keys
        granted = [messages.Visit(one.id, one.epoch, keys[one.prompt], guide(one.prompt), one.stored) for one in visits]
        return ReplyBody(messages.Leases(visits=granted, reason=reason))

    def with_room(self, waiting: Iterable[tuple[str, messages.LeasePrompts]]) -> list[str]:
        """Return the senders whose parked requests can be answered now, the first ones first.

        Each gets at least one prompt of the common room: the work is bounded by what is granted.
        """
        version = self._state.newest.version if self._state.newest else -1
        if version != self._answered_version:
            self._answered_version = version
            return [sender for sender, _ in waiting]
        shared = self._room_for_all()
        if not shared.prompts:
            return []
        found: list[str] = []
        for sender, message in waiting:
            if self._part_of(shared, message, sender) > 0:
                found.append(sender)
                if len(found) == shared.prompts:
                    break
        return found

    def _room_for_all(self) -> _Room:
        """Return the room that the searchers share.

        The limits apply in this order: a finished run, none before the first fill, samples per insert, and staleness.
        """
        state = self._state
        limit = state.config.max_staleness
        if state.finished:
            return _Room(0, "the run is finished")
        if len(state.index) < state.config.buffer.min_fill:
            return _Room(sys.maxsize)
        if (room := self._room_by_rate()) == 0:
            return _Room(0, "searchers are ahead of buffer.samples_per_insert")
        if limit is None:
            return _Room(room)
        # New data is first used by the next batch that is not chosen yet.
        oldest_useful = state.next_step - limit
        target = (limit + 1) * state.config.train.prompts_per_step
        under_way = self._under_way(oldest_useful, target)
        reason = (
            f"{under_way} of {quantity(target, 'prompt')} under way: buffer.max_staleness = {limit} allows no more "
            "before the next step"
        )
        return _Room(max(0, min(room, target - under_way)), reason, oldest_useful, target)

    def _under_way(self, oldest_useful: int, enough: int) -> int:
        """Return how many prompts are leased or have useful data that no batch has yet; at least `enough` if so many.

        That there is no room usually follows from the number of leases alone.
        """
        state, leased = self._state, self._state.leases.leased_prompts
        if len(leased) >= enough:
            return len(leased)
        need = state.sampler.need(state.config.train.samples_per_prompt)
        untrained = state.sampler.untrained_prompts(oldest_useful, need)
        if len(untrained) >= enough:
            return len(untrained)
        return len(leased) + sum(prompt not in leased for prompt in untrained.tolist())

    def _part_of(self, shared: _Room, message: messages.LeasePrompts, sender: str) -> int:
        """Return how many prompts one searcher may lease now.

        Bounded staleness leaves work for the batches that can still use it, divided among the living searchers.
        """
        state = self._state
        room = min(message.want, shared.prompts)
        if not room or shared.target is None:
            return room
        if not self._has_useful_weights(shared, message):
            return 0
        searchers = max(1, state.clients.living("searcher"))
        return max(0, min(room, math.ceil(shared.target / searchers) - state.leases.held_by(sender)))

    def _reason(self, shared: _Room, message: messages.LeasePrompts) -> str:
        if self._has_useful_weights(shared, message):
            return shared.reason
        limit = self._state.config.max_staleness
        return f"weights v{message.weights_version} are too old for max_staleness {limit}"

    def _has_useful_weights(self, shared: _Room, message: messages.LeasePrompts) -> bool:
        version = self._state.versions.get(message.weights_version)
        return shared.oldest_useful is None or (version is not None and version.step >= shared.oldest_useful)

    def _room_by_rate(self) -> int:
        """Return how many prompts samples per insert leave room for; any number while a trainer lacks prompts."""
        state = self._state
        samples = state.config.search.samples_per_prompt
        # What is stored of open visits is under way with the rest of them.
        inserted = state.trajectories - state.leases.stored
        room = state.rate.room(inserted, state.leases.leases * samples, state.sampled)
        lacking = state.too_little_data and state.clients.living("trainer")
        return sys.maxsize if room is None or lacking else room // samples

    def _lease_again(self, visit: OpenVisit, sender: str) -> None:
        self._state.store.visits.lease_again(visit.id, self._state.sender_id(sender), self._state.clock.wall())
        self._state.leases.lease(visit, sender)

    def _open_visits(self, count: int, sender: str) -> list[OpenVisit]:
        state, visits = self._state, list[OpenVisit]()
        while len(visits) < count:
            if state.leases.at_end:
                state.begin_epoch()
            now, sender_id = 1, state.sender_id(sender)
            if state.config.curriculum.longest_first:
                window, searchers = state.config.train.prompts_per_step, max(1, state.clients.living("searcher"))
                lengths = state.store.trajectories.newest_lengths
                now = state.leases.longest_first(window, count - len(visits), searchers, lengths)
            for _ in range(now):
                epoch, position, prompt = state.leases.next_position()
                id_ = state.store.visits.add(state.run, epoch, position, prompt, sender_id, state.clock.wall())
                visits.append(OpenVisit(id_, epoch, prompt, sender))
                state.leases.add(visits[-1])
        return visits
