"""Trajectories come in, from searchers and from imports: each once, however often it is sent."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tba.buffer.answer import Answer
from tba.buffer.index import Block
from tba.buffer.rows import PutColumns, RunColumns, database_columns
from tba.buffer.served_run import ServedRun
from tba.common import wire
from tba.common.errors import Refused

_FREE_SPACE_SECONDS = 1.0


class Puts:
    """Handles PutTrajectories."""

    def __init__(self, served: ServedRun) -> None:
        self._served = served
        self._store = served.store
        self._run = served.run
        self._config = served.config
        self._clock = served.clock
        self._clients = served.clients
        self._free = (-math.inf, 0)  # when the free space was looked at, and what it was

    def put(self, put: PutColumns, sender: str) -> Answer:
        """Every row is checked before the first is added: a put is refused whole or not at all."""
        self._refuse_without_space()
        if self._clients[sender].role == "importer":
            prompts, versions = self._imported_prompts(put), self._imported_versions(put)
        else:
            prompts, versions = self._prompts_of(put), self._oldest_versions(put)
        number, received = self._served.sender_id(sender), self._served.ranges_of(sender)
        missing = received.missing(put.first_sequence, len(put))
        if missing:
            places = [sequence - put.first_sequence for sequence in missing]
            known = RunColumns(self._run.id, number, self._clock.wall(), prompts, versions)
            self._add(put, known, places)
            received.add(put.first_sequence, len(put))
            self._close_visits({(put.visit[place], prompts[place]) for place in places}, sender)
        ack = wire.PutAck(first_sequence=put.first_sequence, stored=len(missing), duplicates=len(put) - len(missing))
        return Answer(ack)

    def _add(self, put: PutColumns, known: RunColumns, places: Sequence[int]) -> None:
        """Write the rows at `places` of a put, and have them sampled."""
        ids = self._store.trajectories.new_ids(len(places))
        columns: Mapping[str, Sequence[Any]] = database_columns(put, known)
        payload: Sequence[Sequence[memoryview]] = put.payload
        references = put.reference_logprob or []
        if len(places) < len(put):  # some of them are there already
            columns = {name: [column[place] for place in places] for name, column in columns.items()}
            payload = [[views[place] for place in places] for views in payload]
            references = [references[place] for place in places] if references else []
        self._store.trajectories.add({"id": ids, **columns}, payload)
        if references:
            every = zip(ids, references, strict=True)
            known_ones = [(id_, wire.INITIAL_REFERENCE, logprob) for id_, logprob in every if logprob is not None]
            self._store.trajectories.add_references(known_ones)
        self._served.trajectories += len(places)
        self._have_sampled(ids, columns)

    def _have_sampled(self, ids: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Enter what is no error into the index."""
        steps = {version: self._step_of(version) for version in set(columns["policy_version"])}
        start = 0
        for (prompt, error), rows in groupby(zip(columns["prompt"], columns["error"], strict=True)):
            part = slice(start, start + len(list(rows)))
            start = part.stop
            if error is not None:
                self._served.errors += part.stop - part.start
                continue
            block = Block(
                prompt=prompt,
                id=ids[part],
                step=[steps[version] for version in columns["policy_version"][part]],
                reward=columns["reward"][part],
                dedup_hash=columns["dedup_hash"][part],
                taken=[False] * (part.stop - part.start),
                payload_bytes=columns["payload_bytes"][part],
            )
            self._served.index.extend(block)

    def _step_of(self, version: int) -> int:
        return self._served.versions[version].step if version != wire.NO_POLICY else 0

    def _refuse_without_space(self) -> None:
        """A full disk is a state to come out of: what is on it must stay readable, and the log needs room."""
        floor = self._config.buffer.min_free_mib << 20
        if floor and (free := self._free_bytes()) < floor:
            raise Refused(
                "storage",
                f"{free >> 20} MiB are free on the disk of {self._store.path}, buffer.min_free_mib is {floor >> 20}: "
                "make room, or run `tba buffer compact`",
            )

    def _free_bytes(self) -> int:
        at, free = self._free
        if (now := self._clock.monotonic()) - at > _FREE_SPACE_SECONDS:
            at, free = self._free = (now, self._store.database.free_bytes())
        return free

    def _prompts_of(self, put: PutColumns) -> list[int]:
        try:
            return [self._served.prompt_ids[key] for key in put.prompt_key]
        except KeyError as error:
            raise Refused(
                "unknown_prompt", f"prompt {error.args[0]!r} is not registered in run {self._run.name}"
            ) from error

    def _oldest_versions(self, put: PutColumns) -> list[int]:
        oldest = {versions: self._oldest(versions) for versions in set(put.versions)}
        return [oldest[versions] for versions in put.versions]

    def _oldest(self, versions: tuple[int, ...]) -> int:
        """The version of the earliest step: after a resume that need not be the smallest."""
        try:
            if len(versions) == 1:
                return self._served.versions[versions[0]].version
            return min(versions, key=lambda version: (self._served.versions[version].step, version))
        except KeyError as error:
            raise Refused("unknown_version", f"policy version {error.args[0]} was never announced") from error

    def _imported_prompts(self, put: PutColumns) -> list[int]:
        ids = self._store.prompts.add_imported(self._run, sorted(set(put.prompt_key)))
        return [ids[key] for key in put.prompt_key]

    def _imported_versions(self, put: PutColumns) -> list[int]:
        """A version number of another run names another policy, even if this run has that number too."""
        return [
            wire.NO_POLICY
            if is_foreign or not self._served.versions.keys() >= set(versions)
            else self._oldest(versions)
            for is_foreign, versions in zip(put.is_foreign, put.versions, strict=True)
        ]

    def _close_visits(self, answered: set[tuple[int, int]], sender: str) -> None:
        """End the visits that these pairs (lease, prompt) answer, unless another sender has got them meanwhile."""
        done = [lease for lease, prompt in answered if self._served.leases.close(lease, prompt, sender)]
        if done:
            self._store.visits.close(done, self._clock.wall())
