"""Trajectories arrive from searchers and imports. Each is stored once, however often it is sent."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tba.buffer.sampling.index import Block, context_of
from tba.buffer.service.put_columns import PutColumns
from tba.buffer.service.run_state import ReplyBody, RunState
from tba.common.errors import Refused
from tba.common.wire import fields, messages


def store_rows(state: RunState, put: PutColumns, sender: str) -> ReplyBody:
    """Store the rows that are new. Every row is checked first: a put is refused whole or not at all."""
    # Of the puts in a transaction the first one asks.
    if not state.uncommitted_puts and (shortage := state.shortage_of_space()):
        raise Refused("storage", shortage)
    if state.clients[sender].role == "importer":
        ids = state.store.prompts.add_imported(state.run, sorted(set(put.prompt_key)))
        prompts, versions = [ids[key] for key in put.prompt_key], _imported_versions(state, put)
    else:
        prompts = _prompts_of(state, put)
        # An explorer's are not versions of this run.
        named = [own if source is None else () for own, source in zip(put.versions, put.counts_from, strict=True)]
        oldest = {own: _oldest(state, own) if own else fields.NO_POLICY for own in set(named)}
        versions = list(map(oldest.__getitem__, named))
    sender_id = state.sender_id(sender)
    stored = state.stored_sequences(sender, put.first_sequence, len(put))
    for sequence, content in stored.items():
        row = sequence - put.first_sequence
        if content != (prompts[row], put.columns["dedup_hash"][row]):
            raise Refused(
                "sequence_taken",
                f"row {row} is trajectory {sequence} of {sender}, which is stored with another prompt or response: "
                "a sender that numbers from 0 again needs a new name",
            )
    rows = [row for row in range(len(put)) if put.first_sequence + row not in stored]
    if rows:
        newest_visit = state.store.visits.newest() if any(put.visit) else 0
        columns = {
            **put.columns,
            "run": [state.run.id] * len(put),
            "prompt": prompts,
            # None without one, or if this database, an older copy, does not have it.
            "visit": [visit if fields.NO_VISIT < visit <= newest_visit else None for visit in put.visit],
            "sender": [sender_id] * len(put),
            "sequence": range(put.first_sequence, put.first_sequence + len(put)),
            "policy_version": versions,
            "counts_from": [
                version if source is None else source for version, source in zip(versions, put.counts_from, strict=True)
            ],
            "received_at": [state.clock.wall()] * len(put),
        }
        _add(state, put, columns, rows)
        state.next_sequences[sender] = max(state.next_sequences[sender], put.first_sequence + len(put))
        if put.closes:
            _close_visits(state, {(put.visit[row], prompts[row]) for row in rows}, sender)
        else:
            for row in rows:
                state.leases.note(put.visit[row])
    ack = messages.PutAck(first_sequence=put.first_sequence, stored=len(rows), duplicates=len(stored))
    state.uncommitted_puts.append((sender, ack))
    return ReplyBody(ack)


def _add(state: RunState, put: PutColumns, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> None:
    """Write these rows of a put, with their database columns, to the store and the index."""
    ids = state.store.trajectories.new_ids(len(rows))
    payload: Sequence[Sequence[memoryview]] = put.payload
    # If all rows are new, the columns are used as they are.
    if len(rows) < len(put):
        columns = {name: [column[row] for row in rows] for name, column in columns.items()}
        payload = [[views[row] for row in rows] for views in payload]
    state.store.trajectories.add({"id": ids, **columns}, payload)
    state.trajectories += len(rows)
    _add_to_index(state, ids, columns)


def _add_to_index(state: RunState, ids: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
    """Enter the rows without an error into the index, as blocks of adjacent rows of one prompt."""
    known = state.versions
    steps = {v: known[v].step if v in known else 0 for v in set(columns["counts_from"])}
    start = 0
    each = zip(columns["prompt"], columns["guided_and_phase"], columns["error"], strict=True)
    for (prompt, (guided, phase), error), rows in groupby(each):
        part = slice(start, start + len(list(rows)))
        start = part.stop
        if error is not None:
            state.errors += part.stop - part.start
            state.uncommitted_errors += columns["error"][part]
            continue
        block = Block(
            prompt=context_of(prompt, guided, phase),
            id=ids[part],
            step=[steps[version] for version in columns["counts_from"][part]],
            reward=columns["reward"][part],
            dedup_hash=columns["dedup_hash"][part],
            trained=[False] * (part.stop - part.start),
            payload_bytes=columns["payload_bytes"][part],
        )
        state.index.extend(block)
        versions = columns["policy_version"][part]
        state.curriculum.note(prompt, versions, block.reward, guided=guided is not None)


def _prompts_of(state: RunState, put: PutColumns) -> list[int]:
    try:
        return [state.prompt_ids[key] for key in put.prompt_key]
    except KeyError as error:
        raise Refused(
            "unknown_prompt", f"prompt {error.args[0]!r} is not registered in run {state.run.name}"
        ) from error


def _oldest(state: RunState, versions: tuple[int, ...]) -> int:
    """Return the version of the earliest step. After a resume that need not be the smallest version."""
    known = state.versions
    try:
        return min(versions, key=lambda version: (known[version].step, version))
    except KeyError as error:
        raise Refused("unknown_version", f"policy version {error.args[0]} was never announced") from error


def _imported_versions(state: RunState, put: PutColumns) -> list[int]:
    """Return NO_POLICY for versions of another run: the same number here names a different policy."""
    known = state.versions.keys()
    return [
        fields.NO_POLICY if source is not None or not known >= set(versions) else _oldest(state, versions)
        for source, versions in zip(put.counts_from, put.versions, strict=True)
    ]


def _close_visits(state: RunState, answered: set[tuple[int, int]], sender: str) -> None:
    """Close the visits that these pairs (visit, prompt) answer, unless they are leased to another sender now."""
    done = [visit for visit, prompt in answered if state.leases.close(visit, prompt, sender)]
    if done:
        state.store.visits.close(done, state.clock.wall())
