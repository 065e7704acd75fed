"""OpenEnv's traces: what its validator accepts is imported, what we export it accepts, and levels are the same."""

import copy
import json
import random
from typing import Any

import numpy as np
import pytest

from tba.buffer.tools.training_trace import Trace, find
from tba.common.wire.trajectory import SampledTurn, join_turns
from tba.tests.helpers import openenv
from tba.tests.helpers.buffer import ask as ask_file

needs_openenv = pytest.mark.skipif(not openenv.is_there(), reason="openenv is not installed (tests/helpers/openenv.py)")


def call(prompt, sampled, number=0, reason="stop", **metadata):
    return {
        "node_id": f"node{number}",
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": [-0.25] * len(sampled),
        "loss_mask": [0] * len(prompt) + [1] * len(sampled),
        "request": {},
        "response": {"choices": [{"finish_reason": reason}]},
        "metadata": {"sampling_params": {"temperature": 1.0}, **metadata},
    }


SCORED = {"verify": {"env_reward": 1.0, "metrics": {"won": 1, "by": "hand"}, "done": True}}


def episode(**last):
    """Return a trace of three turns, each of which extends the one before."""
    calls = [call([1, 2], [3]), call([1, 2, 3, 4], [5, 6], 1), call([1, 2, 3, 4, 5, 6, 7], [8], 2, **SCORED, **last)]
    return {"schema_version": 1, "turns": calls}


def ours(trace):
    try:
        return {(finding.level, finding.check) for finding in find(Trace.model_validate(trace).turns)}
    except ValueError:
        return {("FATAL", "schema")}


# Each changes the calls of `episode`, in place or by returning others.
MUTATIONS = {
    "logprob_misalign": lambda calls: calls[1]["per_token_logps"].pop(),
    "positive_logprob": lambda calls: calls[1]["per_token_logps"].__setitem__(0, 0.5),
    "invalid_logprob": lambda calls: calls[1]["per_token_logps"].__setitem__(0, float("nan")),
    "length_mismatch": lambda calls: calls[2]["loss_mask"].append(1),
    "invalid_loss_mask": lambda calls: calls[2]["loss_mask"].__setitem__(-1, 2),
    "trainable_prompt": lambda calls: calls[2]["loss_mask"].__setitem__(0, 1),
    "invalid_token_id": lambda calls: calls[0]["prompt_token_ids"].__setitem__(0, -1),
    "no_prompt_ids": lambda calls: calls[0].update(call([], [3])),
    "nothing_trainable": lambda calls: [
        one["loss_mask"].__setitem__(slice(None), [0] * len(one["loss_mask"])) for one in calls
    ],
    "no_turns": lambda calls: calls.clear(),
    "schema": lambda calls: calls[1].pop("loss_mask"),
    "schema: unknown key": lambda calls: calls[1].update(reward=1.0),
    "schema: not a number": lambda calls: calls[1]["completion_token_ids"].__setitem__(0, True),
    "schema: node_id": lambda calls: calls[1].update(node_id=""),
    "duplicate_node_ids": lambda calls: calls[1].update(node_id="node0"),
}
WARNINGS = {
    "no_sampled_ids": lambda calls: calls.append(call([1, 2, 3, 4, 5, 6, 7, 8, 9], [], 3)),
    "truncated_turn": lambda calls: calls[1]["response"]["choices"][0].update(finish_reason="length"),
    "multiple_roots": lambda calls: calls[2]["prompt_token_ids"].__setitem__(0, 9),
    "per_turn_capture_only": lambda calls: [one["prompt_token_ids"].__setitem__(1, n) for n, one in enumerate(calls)],
    "degenerate_rollout": lambda calls: calls.__delitem__(slice(1, None)),
    "discarded_turns": lambda calls: calls.insert(1, call([1, 2, 3, 4], [9], 9)),
    "discarded_turns: first": lambda calls: calls.insert(0, call([1, 2], [9], 9)),
}


def mutated(mutate):
    trace = copy.deepcopy(episode())
    mutate(trace["turns"])
    return trace


@pytest.mark.parametrize(("level", "name"), [*(("FATAL", n) for n in MUTATIONS), *(("WARN", n) for n in WARNINGS)])
def test_each_mutation_is_found_at_its_level(level, name):
    found = ours(mutated((MUTATIONS | WARNINGS)[name]))
    assert (level, name.partition(":")[0]) in found
    assert {level for level, _ in found} == {level}
    assert ours(episode()) == set()


@needs_openenv
@pytest.mark.parametrize("name", ["none", *MUTATIONS, *WARNINGS])
def test_openenvs_validator_finds_the_same(name):
    trace = mutated({"none": lambda _: None, **MUTATIONS, **WARNINGS}[name])
    # Its schema has no name for two equal identifiers.
    assert openenv.validate(trace) == {
        (level, "schema" if "node_ids" in check else check) for level, check in ours(trace)
    }


@needs_openenv
def test_both_agree_on_random_graphs_of_calls():
    rng = random.Random(0)
    for _ in range(300):
        calls, known = [], [[1], [2]]
        for number in range(rng.randint(1, 7)):
            # Extends an earlier call, repeats its prompt, or begins a new conversation.
            prompt = [*rng.choice(known), *rng.choices([3, 4], k=rng.randint(0, 2))]
            sampled = rng.choices([5, 6], k=rng.randint(1, 2))
            known += [prompt, prompt + sampled, prompt + sampled]
            calls.append(call(prompt, sampled, number))
        rng.shuffle(calls)
        assert ours({"turns": calls}) == openenv.validate({"turns": calls}), calls


# ---------------------------------------------------------------- export


def random_episode(rng, make):
    """Return a row of one to five turns: some begin a segment, tokens have several versions, some are masked."""
    turns, context = [], [1, 2]
    for _ in range(rng.randint(1, 5)):
        sampled = rng.choices(range(3, 9), k=rng.randint(1, 4))
        first = rng.randint(0, len(sampled))
        runs = [(version, n) for version, n in ((0, first), (1, len(sampled) - first)) if n]
        details = {"seconds": 0.5, "reward": rng.random(), "messages": [["user", "no"]]}
        turns.append(SampledTurn(context, sampled, [-rng.random() for _ in sampled], runs, details))
        context = [9, *context] if rng.random() < 0.2 else [*context, *sampled]
        context = [*context, *rng.choices(range(3, 9), k=rng.randint(1, 3))]
    tokens = join_turns(turns)._asdict()
    if len(tokens["response_ids"]) > 3:
        # Not the last token of a segment, which needs one that counts.
        masked = [t["start"] for t in tokens["turns"] if t["tokens"] > 1]
        tokens["loss_mask"][masked[:1]] = tokens["logprobs"][masked[:1]] = 0
    reason = rng.choice(["completed", "max_turns", "max_tokens"])
    return make(
        f"p{rng.randint(0, 1)}", 0, stop_reason=reason, reward=rng.random(), tokens=tokens.pop("response_ids"), **tokens
    )


def test_an_exported_episode_is_imported_unchanged(harness, trajectory, tba_buffer, tmp_path, example_model):
    buffer = harness(fill=(2, 3))
    buffer.announce(1, 1)
    rng = random.Random(1)
    buffer.put([random_episode(rng, trajectory) for _ in range(60)], 100)
    turn = {"start": 0, "tokens": 2, "seconds": 1.0, "reward": 0.0, "parts": {}, "messages": []}
    one = {"tokens": [5, 6], "loss_mask": np.ones(2, np.uint8), "turns": [turn]}
    failed = {"error": "it hung", "error_kind": "turn_timeout", "stop_reason": "turn_timeout", "reward": 0.0}
    odd = [trajectory(**one, stop_reason="completed"), trajectory(**one, **failed), trajectory(tokens=[], **failed)]
    rounding = trajectory(tokens=[5], logprobs=np.array([1e-7], np.float32), stop_reason="length")
    broken = trajectory(tokens=[5], logprobs=np.array([0.5], np.float32))
    demonstration = trajectory(metadata={"logprobs": "absent"})
    buffer.put([*odd, rounding, broken, demonstration], 200)
    done = tba_buffer("export", "traces.jsonl", "--format", "openenv", "-b", buffer.store.path, "--json").json
    assert (done["trajectories"], done["without_tokens"]) == (69, 3)
    traces = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    for trace in traces if openenv.is_there() else ():
        assert [found for found in openenv.validate(trace) if found[0] == "FATAL"] == []
    other = tmp_path / "other/buffer.sqlite"
    target = [f"--set=run.dir={other.parent}", "--set=run.name=other", f"--set=model.path={example_model}"]
    assert tba_buffer("import", "traces.jsonl", *target, "--json").json["new"] == 69
    query = """SELECT v.prompt, v.reward, v.reward_parts, v.stop_reason, v.error, v.error_kind, r.turns, v.temperature,
        v.created_at, prompt_ids, response_ids, logprobs, loss_mask, segments FROM trajectories v
        JOIN trajectory_rows r USING (id) JOIN payloads ON trajectory = v.id
        WHERE v.response_tokens > 0 AND v.metadata NOT LIKE '%absent%' AND hex(logprobs) <> '0000003F'
        ORDER BY v.created_at, v.reward, response_ids, v.stop_reason"""
    before, after = ask_file(buffer.store.path, query), ask_file(other, query)
    assert len(before) == 69
    different = [
        np.frombuffer(row[11], "<f4") for pair in zip(before, after, strict=True) if len({*pair}) > 1 for row in pair
    ]
    # The rounding of a probability of 1 is gone.
    assert [one.tolist() for one in different] == [[pytest.approx(1e-7)], [0]]
    assert tba_buffer("import", "traces.jsonl", *target, "--json").json["there_already"] == 69


# ---------------------------------------------------------------- import


@pytest.fixture
def import_into(tba_buffer, filled, tmp_path):
    """Imports traces into the run of `filled`, which has announced version 0; returns the command's outcome."""

    def run(*traces, options=("--json",)):
        (tmp_path / "traces.jsonl").write_text("".join(json.dumps(trace) + "\n" for trace in traces))
        return tba_buffer("import", "traces.jsonl", "-b", filled, "--set", "run.name=test", *options)

    return run


def new_rows(filled, columns):
    tables = "trajectories v JOIN trajectory_rows r USING (id) JOIN payloads ON trajectory = v.id"
    return ask_file(filled, f"SELECT {columns} FROM {tables} WHERE v.id > 7 ORDER BY v.id")


def test_a_trace_becomes_one_row_with_a_table_of_its_turns(import_into, filled):
    trace = episode(prompt_key="game 7", seconds=2.0, reward=0.5)
    # No float holds it.
    trace["turns"][2]["metadata"]["verify"] = SCORED["verify"] | {"metrics": {"won": 1, "digits": 10**400}}
    for n, one in enumerate(trace["turns"]):
        one["request"] = {"messages": [{"role": "user", "content": str(m)} for m in range(2 * n + 1)]}
    assert import_into(trace).json["new"] == 1
    columns = "v.prompt, v.reward, v.reward_parts, v.stop_reason, r.turns, response_ids, loss_mask"
    ((prompt, reward, parts, reason, turns, response, mask),) = new_rows(filled, columns)
    assert (prompt, reward, json.loads(parts), reason) == ("game 7", 1.0, {"won": 1.0}, "completed")
    assert np.frombuffer(response, "<i4").tolist() == [3, 4, 5, 6, 7, 8]
    assert list(mask) == [1, 0, 1, 1, 0, 1]
    empty = {"seconds": 0.0, "reward": 0.0, "parts": {}}
    assert json.loads(turns) == [
        {"start": 0, "tokens": 1, **empty, "messages": [["user", "2"]]},
        {"start": 2, "tokens": 2, **empty, "messages": [["user", "4"]]},
        {"start": 5, "tokens": 1, "seconds": 2.0, "reward": 0.5, "parts": {}, "messages": []},
    ]


@pytest.mark.parametrize("name", ["schema", "schema: node_id", "logprob_misalign", "no_turns"])
def test_a_fatal_check_refuses_the_file_with_its_place_and_name(name, import_into, filled):
    refused = import_into(episode(), mutated(MUTATIONS[name]))
    assert refused.exit_code == 2
    assert refused.message.startswith("traces.jsonl:2: turn")
    assert name.startswith("schema") or f": {name}: " in refused.message
    assert new_rows(filled, "v.id") == []


def test_warnings_are_counted_and_told(import_into):
    traces = [episode(), *(mutated(WARNINGS[name]) for name in ("multiple_roots", "truncated_turn", "discarded_turns"))]
    unscored = mutated(lambda calls: calls[2]["metadata"].pop("verify"))
    counts = {"discarded_turns": 1, "multiple_roots": 1, "truncated_turn": 1, "unscored": 1}
    assert import_into(*traces, unscored).json["warnings"] == counts
    assert "multiple_roots: 1 trace\n" in import_into(*traces, unscored, options=()).message


def test_what_was_not_scored_is_an_error_and_not_a_reward_of_0(import_into, filled):
    traces = []
    unscored: list[dict[str, Any]] = [{}, {"verify": {}}, {"verify": {"env_reward": None}}]
    for metadata in unscored:
        # As an export has it that is scored again.
        traces.append(episode(tba={"error": None, "error_kind": None}))
        traces[-1]["turns"][2]["metadata"].pop("verify")
        traces[-1]["turns"][2]["metadata"] |= metadata
    import_into(*traces)
    error = "the trace has no env_reward: it was not scored"
    assert new_rows(filled, "v.error, v.error_kind, v.reward") == [(error, "imported", 0.0)] * 3


OURS = ["policy@v0"] * 3
# The model and the run of each call, whether spans and runs are in the messages, as after OpenEnv's capture, and the
# version and the run of the row. v7 is a version that this run never had, and another server answered the last call.
VERSIONS = [
    (OURS, [None] * 3, False, 0, None),
    (OURS, ["{own}"] * 3, False, 0, None),
    (OURS, ["{own}", None, None], False, 0, None),
    (OURS, ["another"] * 3, False, -1, "another"),
    (OURS, ["another", "{own}", "{own}"], False, -1, None),
    (["policy"] * 3, ["{own}"] * 3, True, 0, None),
    (["policy@v7"] * 3, [None] * 3, False, -1, None),
    (["gpt-oss-20b"] * 3, [None] * 3, False, -1, None),
    (["policy@v0", "policy@v0", None], [None] * 3, False, -1, None),
]


@pytest.mark.parametrize("spans", [None, [[0, 1, 0]]])
@pytest.mark.parametrize(("models", "runs", "captured", "version", "named"), VERSIONS)
def test_versions_are_of_this_run_only_if_it_served_every_call(
    models, runs, captured, version, named, spans, import_into, filled
):
    ((own,),) = ask_file(filled, "SELECT uuid FROM runs")
    trace = episode()
    for one, model, written in zip(trace["turns"], models, runs, strict=True):
        run = written and written.format(own=own)
        one["metadata"]["model"] = model
        one["response"]["run"] = None if captured else run
        if captured:
            whole = [[0, len(one["completion_token_ids"]), 0]]
            said = {"role": "assistant", "content": "5", "version_spans": whole, "run": run}
            one["response"]["choices"] = [{"message": said} | ({} if spans else {"version_spans": None})]
        elif one is trace["turns"][0] and models == OURS:
            one["response"]["choices"][0]["version_spans"] = spans
    import_into(trace)
    ((found, searcher, metadata),) = new_rows(filled, "v.policy_version, searcher, v.metadata")
    assert (found, json.loads(metadata).get("imported_run")) == (version, named)
    assert searcher.startswith("import.")


@pytest.mark.parametrize(
    "spans", [[[0, 1, 0]], [[0, 2, -1]], [[0, 2, 1 << 31]], [[0, 1, 0], [0, 2, 0]], [[0, 5, 1], [5, 2, 2]]]
)
def test_spans_of_versions_must_cover_the_sampled_tokens(spans, import_into):
    trace = episode()
    trace["turns"][1]["response"]["choices"][0]["version_spans"] = spans
    assert "traces.jsonl:1: turn 2: version_spans: they are not" in import_into(trace).message


def test_turns_sampled_in_different_ways_are_refused_and_what_is_not_modelled_is_an_unknown_sampler(
    import_into, filled
):
    trace = episode()
    for one, changes in zip(trace["turns"], ({"top_k": 20}, {"top_k": 20, "min_p": 0}, {"top_k": 20}), strict=True):
        one["metadata"]["sampling_params"] |= changes
    assert import_into(trace).json["warnings"]["sampling_not_modelled"] == 1
    assert new_rows(filled, "v.temperature, v.top_p") == [(0.0, 1.0)]
    other = episode()
    other["turns"][1]["metadata"]["sampling_params"] = {"temperature": 0.5}
    words = "turns: sampling_policy_changed: temperature and top_p are [(0.5, 1.0), (1.0, 1.0)]"
    assert words in import_into(other).message


def test_a_trace_without_a_key_is_identified_by_its_first_prompt_and_an_exported_one_keeps_all_its_turns(
    import_into, filled
):
    # Its context returns to an earlier one.
    calls = [call([1], [2]), call([1], [3], 1), call([1, 3, 4], [5], 2, **SCORED, tba={"stop_reason": "completed"})]
    import_into(episode(), episode(), mutated(lambda calls: calls[0].update(call([5, 2], [3]))), {"turns": calls})
    (first, _), (second, _), (other, _), (_, turns) = new_rows(filled, "v.prompt, v.turns")
    assert first == second != other
    assert first.startswith("sha256:")
    assert turns == 3


def test_turns_that_led_nowhere_and_what_is_masked_are_context_and_parallel_conversations_are_not_mixed(
    import_into, filled
):
    own = [call([1, 2], [3]), call([1, 2, 3, 4], [5], 1), call([1, 2], [9], 2)]
    helper = [call([7], [8], 3), call([7, 8, 6], [5], 4, **SCORED)]
    masked = episode()
    masked["turns"][0]["loss_mask"] = [0, 0, 0]
    masked["turns"][1]["loss_mask"][-1] = 0
    import_into({"turns": [own[0], helper[0], own[2], own[1], helper[1]]}, masked)
    columns = new_rows(filled, "prompt_ids, response_ids, segments, loss_mask, logprobs")
    types = ("<i4", "<i4", "<i4", "u1", "<f4")
    rows = [[np.frombuffer(blob, kind).tolist() for blob, kind in zip(row, types, strict=True)] for row in columns]
    assert rows == [
        [[1, 2], [3, 4, 5, 7, 8, 6, 5], [3], [1, 0, 1, 0, 1, 0, 1], [-0.25, 0, -0.25, 0, -0.25, 0, -0.25]],
        [[1, 2, 3, 4], [5, 6, 7, 8], [], [1, 0, 0, 1], [-0.25, 0, 0, -0.25]],
    ]
