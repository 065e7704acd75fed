"""Requests of searchers before they generate: register the prompts once, then lease as many as there is room for."""

import math
import sys

from tba.buffer.service.clients import GONE
from tba.buffer.service.run_state import ReplyBody, RunState, refuse_beyond
from tba.buffer.store.tables.prompts import OpenVisit
from tba.common.errors import Refused
from tba.common.quantity import quantity
from tba.common.wire import messages


class Leasing:
    """Handles RegisterPrompts and LeasePrompts."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def register_prompts(self, message: messages.RegisterPrompts, _: str) -> ReplyBody:
        """Add a chunk of the task's prompts. Every searcher sends the same ones."""
        state = self._state
        refuse_beyond("task", message.total)
        needed = state.config.train.prompts_per_step
        if message.total < needed:
            raise Refused(
                "too_few_prompts",
                f"task {message.task} has {quantity(message.total, 'prompt')} and a batch needs "
                f"{needed} different ones: lower train.prompts_per_step",
            )
        task, fingerprint, total = state.store.runs.task(state.run)
        if task is None:
            total = message.total
            state.store.runs.register_task(state.run, message.task, message.fingerprint, total)
        elif fingerprint != message.fingerprint:
            raise Refused(
                "other_prompts",
                f"run {state.run.name} works on {quantity(total, 'prompt')} of {task}; this searcher has other data "
                f"({quantity(message.total, 'prompt')} of {message.task}): use the same files on every node",
            )
        if len(state.prompt_ids) < total and message.keys:
            state.add_prompts(message.offset, message.keys, message.texts)
        known = len(state.prompt_ids)
        return ReplyBody(messages.Registered(known=known, complete=known == total))

    def lease_prompts(self, message: messages.LeasePrompts, sender: str) -> ReplyBody | None:
        """Re-grant leases whose reply was lost, hand over abandoned visits, then open new ones.

        None parks the request: there is no room, and the reply would carry no newer weights.
        """
        state = self._state
        if not state.prompt_ids or len(state.prompt_ids) < state.store.runs.task(state.run)[2]:
            raise Refused("no_prompts", "the prompts of the run are not registered yet")
        if state.clients[sender].activity == GONE:
            return ReplyBody(messages.Leases(visits=[], reason="it said goodbye"))
        # A sender that was silent for too long keeps the leases that no other sender has received since.
        for visit in (state.leases.open.get(lease) for lease in message.held):
            if visit is not None and visit.sender is None:
                self._lease_again(visit, sender)
        lost = state.leases.lost_by(sender, set(message.held))
        room, reason = self._room(message, sender)
        abandoned = state.leases.unheld()[: max(0, room - len(lost))]
        for visit in abandoned:
            self._lease_again(visit, sender)
        new = [self._open_visit(sender) for _ in range(room - len(lost) - len(abandoned))]
        visits = [*lost, *abandoned, *new]
        # A reply that announces newer weights must not wait for work that needs them.
        has_newest = state.newest is None or message.weights_version == state.newest.version
        if not visits and message.want and has_newest:
            state.clients[sender].held_back = reason
            return None
        granted = [
            messages.Visit(lease=visit.id, epoch=visit.epoch, prompt_key=state.prompt_keys[visit.prompt])
            for visit in visits
        ]
        return ReplyBody(messages.Leases(visits=granted, reason=reason))

    def _lease_again(self, visit: OpenVisit, sender: str) -> None:
        self._state.store.visits.lease_again(visit.id, self._state.sender_id(sender), self._state.clock.wall())
        visit.sender = sender

    def _room(self, message: messages.LeasePrompts, sender: str) -> tuple[int, str]:
        """Return how many prompts this searcher may lease now, and why not more.

        The limits apply in this order: a finished run, none before the first fill, samples per insert, and staleness.
        Bounded staleness leaves work for the batches that can still use it, divided among the living searchers.
        """
        state = self._state
        limit = state.rules.max_staleness
        if state.finished:
            return 0, "the run is finished"
        if len(state.index) < state.rules.min_fill:
            return message.want, ""
        if (room := self._room_by_rate()) == 0:
            return 0, "searchers are ahead of buffer.samples_per_insert"
        if limit is None:
            return min(message.want, room), ""
        # New data is first used by the next batch that is not chosen yet.
        oldest_useful = state.next_step - limit
        version = state.versions.get(message.weights_version)
        if version is None or version.step < oldest_useful:
            return 0, f"weights v{message.weights_version} are too old for max_staleness {limit}"
        target = (limit + 1) * state.config.train.prompts_per_step
        need = state.rules.need(state.config.train.samples_per_prompt)
        leased = {visit.prompt for visit in state.leases.leased()}
        under_way = len(leased | state.sampler.untrained_prompts(oldest_useful, need))
        searchers = max(1, state.clients.living("searcher"))
        fair_part = math.ceil(target / searchers) - state.leases.held_by(sender)
        room = max(0, min(message.want, room, target - under_way, fair_part))
        return room, f"{under_way} of {quantity(target, 'prompt')} under way"

    def _room_by_rate(self) -> int:
        """Return how many prompts the ratio of samples to inserts leaves room for.

        It holds no searcher back while a living trainer lacks prompts: the inserted trajectories may be of too few
        prompts, or too much alike, for a batch.
        """
        state = self._state
        samples = state.config.search.samples_per_prompt
        room = state.rate.room(state.trajectories, len(state.leases.leased()) * samples, state.sampled)
        lacking = state.too_little_data and state.clients.living("trainer")
        return sys.maxsize if room is None or lacking else room // samples

    def _open_visit(self, sender: str) -> OpenVisit:
        state = self._state
        epoch, position, prompt = state.leases.next_position()
        sender_id = state.sender_id(sender)
        id_ = state.store.visits.add(state.run, epoch, position, prompt, sender_id, state.clock.wall())
        visit = OpenVisit(id_, epoch, prompt, sender)
        state.leases.open[id_] = visit
        return visit
