"""Trajectories come in, from searchers and from imports: each once, however often it is sent."""

import math
from collections.abc import Sequence

from tba.buffer.answer import Answer
from tba.buffer.index import Entry
from tba.buffer.rows import PutColumns, RunColumns, database_rows
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
            prompts, versions = self._prompts_of(put), [self._oldest(versions) for versions in put.versions]
        number, received = self._served.sender_id(sender), self._served.ranges_of(sender)
        missing = received.missing(put.first_sequence, len(put))
        if missing:
            ids = self._store.trajectories.new_ids(len(missing))
            places = [sequence - put.first_sequence for sequence in missing]
            every = ids if len(ids) == len(put) else range(len(put))
            known = RunColumns(self._run.id, number, self._clock.wall(), every, prompts, versions)
            self._add(put, known, ids, places)
            received.add(put.first_sequence, len(put))
            self._close_visits({(put.rows.lease[place], prompts[place]) for place in places}, sender)
        ack = wire.PutAck(first_sequence=put.first_sequence, stored=len(missing), duplicates=len(put) - len(missing))
        return Answer(ack)

    def _add(self, put: PutColumns, known: RunColumns, ids: Sequence[int], places: Sequence[int]) -> None:
        """Write the rows at `places` of a put, under these ids, and have them sampled."""
        rows, payloads = database_rows(put, known), put.payload
        if len(places) < len(put):  # some of them are there already
            rows = [(id_, *rows[place][1:]) for id_, place in zip(ids, places, strict=True)]
            payloads = [payloads[place] for place in places]
        self._store.trajectories.add(rows, payloads)
        if (references := put.rows.reference_logprob) is not None:
            known_logprobs = ((id_, references[place]) for id_, place in zip(ids, places, strict=True))
            self._store.trajectories.add_references(
                [(id_, wire.INITIAL_REFERENCE, logprob) for id_, logprob in known_logprobs if logprob is not None]
            )
        self._served.trajectories += len(places)
        columns = (put.rows.error, known.versions, known.prompts, put.rows.reward, put.dedup_hash, put.payload_bytes)
        values = list(zip(*columns, strict=True))
        index, known_versions = self._served.index, self._served.versions
        for id_, place in zip(ids, places, strict=True):
            error, version, prompt, reward, dedup_hash, size = values[place]
            if error is not None:
                self._served.errors += 1
                continue
            step = known_versions[version].step if version != wire.NO_POLICY else 0
            index.add(Entry(id_, prompt, step, reward, dedup_hash, False, size))

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
            return [self._served.prompt_ids[key] for key in put.rows.prompt_key]
        except KeyError as error:
            raise Refused(
                "unknown_prompt", f"prompt {error.args[0]!r} is not registered in run {self._run.name}"
            ) from error

    def _oldest(self, versions: list[int]) -> int:
        """The version of the earliest step: after a resume that need not be the smallest."""
        try:
            if len(versions) == 1:
                return self._served.versions[versions[0]].version
            return min(versions, key=lambda version: (self._served.versions[version].step, version))
        except KeyError as error:
            raise Refused("unknown_version", f"policy version {error.args[0]} was never announced") from error

    def _imported_prompts(self, put: PutColumns) -> list[int]:
        ids = self._store.prompts.add_imported(self._run, sorted(set(put.rows.prompt_key)))
        return [ids[key] for key in put.rows.prompt_key]

    def _imported_versions(self, put: PutColumns) -> list[int]:
        """A version number of another run names another policy, even if this run has that number too."""
        return [
            wire.NO_POLICY
            if "imported_version" in metadata or not self._served.versions.keys() >= set(versions)
            else self._oldest(versions)
            for metadata, versions in zip(put.rows.metadata, put.versions, strict=True)
        ]

    def _close_visits(self, answered: set[tuple[int, int]], sender: str) -> None:
        """End the visits that these pairs (lease, prompt) answer, unless another sender has got them meanwhile."""
        done = [lease for lease, prompt in answered if self._served.leases.close(lease, prompt, sender)]
        if done:
            self._store.visits.close(done, self._clock.wall())
