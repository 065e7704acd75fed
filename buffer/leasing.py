"""What searchers ask before they generate: prompts are registered once, then leased, as many as there is room for."""

import math
import sys

from tba.buffer.answer import Answer
from tba.buffer.clients import GONE
from tba.buffer.leases import OpenVisit
from tba.buffer.served_run import ServedRun, refuse_beyond
from tba.common import wire
from tba.common.errors import Refused
from tba.common.quantity import quantity


class Leasing:
    """Handles RegisterPrompts and LeasePrompts."""

    def __init__(self, served: ServedRun) -> None:
        self._served = served
        self._store = served.store
        self._run = served.run
        self._config = served.config
        self._clock = served.clock
        self._clients = served.clients
        self._rules = served.rules
        self._rate = served.rate

    def register_prompts(self, message: wire.RegisterPrompts, _: str) -> Answer:
        """The same from everybody, a part in each message."""
        refuse_beyond("task", message.total)
        task, fingerprint, total = self._store.runs.task(self._run)
        if message.total < self._config.train.prompts_per_step:
            raise Refused(
                "too_few_prompts",
                f"task {message.task} has {quantity(message.total, 'prompt')} and a batch needs "
                f"{self._config.train.prompts_per_step} different ones: lower train.prompts_per_step",
            )
        if task is None:
            total = message.total
            self._store.runs.register_task(self._run, message.task, message.fingerprint, total)
        elif fingerprint != message.fingerprint:
            raise Refused(
                "other_prompts",
                f"run {self._run.name} works on {quantity(total, 'prompt')} of {task}; this searcher has other data "
                f"({quantity(message.total, 'prompt')} of {message.task}): use the same files on every node",
            )
        if len(self._served.prompt_ids) < total and message.keys:
            self._served.add_prompts(message.offset, message.keys)
        known = len(self._served.prompt_ids)
        return Answer(wire.Registered(known=known, complete=known == total))

    def lease_prompts(self, message: wire.LeasePrompts, sender: str) -> Answer | None:
        """What it has lost, what nobody holds, and new visits; None if there is no room and no news."""
        if not self._served.prompt_ids or len(self._served.prompt_ids) < self._store.runs.task(self._run)[2]:
            raise Refused("no_prompts", "the prompts of the run are not registered yet")
        if self._clients[sender].activity == GONE:
            return Answer(wire.Leases(visits=[], reason="it said goodbye"))
        self._take_back(message.held, sender)
        lost = self._served.leases.lost_by(sender, set(message.held))
        room, reason = self._room_for_leases(message, sender)
        again = self._served.leases.unheld()[: max(0, room - len(lost))]
        for visit in again:
            self._store.visits.lease_again(visit.id, sender, self._clock.wall())
            visit.sender = sender
        new = [self._new_visit(sender) for _ in range(room - len(lost) - len(again))]
        if not (visits := [*lost, *again, *new]) and message.want and not self._has_old_weights(message):
            self._clients[sender].held_back = reason
            return None
        granted = [
            wire.Visit(lease=visit.id, epoch=visit.epoch, prompt_key=self._served.prompt_keys[visit.prompt])
            for visit in visits
        ]
        return Answer(wire.Leases(visits=granted, reason=reason))

    def _take_back(self, held: list[int], sender: str) -> None:
        """A sender that was silent for too long, and is at work, keeps what nobody else has got meanwhile."""
        for visit in (self._served.leases.open.get(lease) for lease in held):
            if visit is not None and visit.sender is None:
                self._store.visits.lease_again(visit.id, sender, self._clock.wall())
                visit.sender = sender

    def _has_old_weights(self, message: wire.LeasePrompts) -> bool:
        """The answer carries the news of the newest weights: it must not wait for work that needs them."""
        return self._served.newest is not None and message.weights_version != self._served.newest.version

    def _room_for_leases(self, message: wire.LeasePrompts, sender: str) -> tuple[int, str]:
        """How many prompts the rate limiter lets a searcher have now, and why not more."""
        limit = self._rules.max_staleness
        if self._served.finished:
            return 0, "the run is finished"
        if len(self._served.index) < self._rules.min_fill:
            return message.want, ""
        if (room := self._room_by_rate()) == 0:
            return 0, "searchers are ahead of buffer.samples_per_insert"
        if limit is None:
            return min(message.want, room), ""
        oldest_useful = self._served.next_step - limit  # the batch that is not chosen yet is who will use it
        version = self._served.versions.get(message.weights_version)
        if version is None or version.step < oldest_useful:
            return 0, f"weights v{message.weights_version} are too old for max_staleness {limit}"
        target = (limit + 1) * self._config.train.prompts_per_step
        need = self._rules.need(self._config.train.samples_per_prompt)
        underway = len(self._served.leases.leased_prompts() | self._served.index.fresh_prompts(oldest_useful, need))
        share = math.ceil(target / max(1, self._clients.living("searcher"))) - self._served.leases.held_by(sender)
        room = max(0, min(message.want, room, target - underway, share))
        return room, f"{underway} of {quantity(target, 'prompt')} under way"

    def _room_by_rate(self) -> int:
        """How many prompts the ratio of samples to inserts leaves room for.

        Nobody is held back while a trainer lacks prompts, not trajectories: what was inserted may be too few
        prompts, or too much alike, for a batch. One that has gone lacks nothing.
        """
        each = self._config.search.samples_per_prompt
        room = self._rate.room(self._served.trajectories, self._served.leases.held() * each, self._served.sampled)
        lacking = self._served.too_little_data and self._clients.living("trainer")
        return sys.maxsize if room is None or lacking else room // each

    def _new_visit(self, sender: str) -> OpenVisit:
        epoch, place, prompt = self._served.leases.next_place()
        id_ = self._store.visits.add(self._run, epoch, place, prompt, sender, self._clock.wall())
        visit = OpenVisit(id_, epoch, prompt, sender)
        self._served.leases.open[id_] = visit
        return visit
