"""`tba buffer rescore`: the log-probabilities of stored responses at snapshots of their run."""

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tba.common.weights.snapshot import MANIFEST, directory_name, read
from tba.common.wire.trajectory import sequences
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings
from tba.tests.helpers.buffer import ask, change
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.puts import make_episode, make_trajectory
from tba.tests.helpers.trainer import FakeSearcher

EPISODE = {"tokens": [5, 6, 7, 7, 1, 2, 7, 6, 3, 1, 6, 4]}


def sampled_by(engine: Any, version: int, temperature: float) -> list[Any]:
    """Return responses of an engine to four prompts, as they are stored."""
    asked = [
        GenerationRequest(n, np.array([1, n + 2], np.int32), SamplingSettings(temperature, 1.0, max_tokens=3 + n))
        for n in range(4)
    ]
    for request in asked:
        engine.submit(request)
    rows = []
    while engine.in_flight:
        for one in engine.step():
            tokens = {"tokens": one.response_ids, "logprobs": one.logprobs, "prompt_ids": asked[one.id].prompt_ids}
            rows.append(make_trajectory(f"p{one.id}", 0, version, **tokens, sampling=_sampling(temperature)))
    return rows


def _sampling(temperature: float) -> dict[str, float]:
    return {"temperature": temperature, "top_p": 1.0}


def by_a_plain_forward(model: Any, row: Any, temperature: float) -> float:
    """Return the log-probability of a response, a pass over each of its sequences."""
    total = 0.0
    for context, response, mask, _ in sequences(row):
        ids = torch.tensor([[*context.tolist(), *response.tolist()]])
        logprobs = (model(ids).logits[0, len(context) - 1 : -1] / temperature).log_softmax(-1)
        own = logprobs.gather(1, ids[0, len(context) :, None])[:, 0]
        total += float(own[torch.from_numpy(mask != 0)].sum().detach())
    return total


@pytest.fixture
def recorded(publisher_harness, tba_here):
    """A stopped buffer with rows of two snapshots and of others, its rows, and a function that rescores them."""
    lab, rows = publisher_harness(keep_snapshots=4), []
    publisher, engine = lab.publisher(), cpu_engine(lab.files)
    searcher = FakeSearcher(lab.buffer.address, prompts=4)
    for version, temperature in enumerate((1.0, 0.7, 1.0)):
        lab.change_a_few(version, fraction=0.9)
        publisher.publish(step=version)
        assert publisher.flush(60)
        engine.load_weights(read(lab.config.snapshots / directory_name(version)))
        rows += sampled_by(engine, version, temperature)
    shutil.rmtree(lab.config.snapshots / directory_name(2))
    rows.append(make_episode("p0", 0, 1, **EPISODE, sampling=_sampling(1.0)))
    rows.append(make_trajectory("p1", 0, tokens=[3, 4, 5], version_runs=np.array([[0, 1], [1, 2]], np.int32)))
    searcher.put(rows)
    searcher.close()
    lab.buffer.stop()
    directory = lab.config.run.dir

    def rescore(*arguments: str) -> Any:
        return tba_here("buffer", "rescore", directory, "--set", "run.name=r", "--cpu", *arguments)

    return lab, rows, rescore


def test_rescored_log_probabilities_are_those_of_the_engine_and_of_a_plain_forward(recorded):
    lab, rows, rescore = recorded
    done = rescore("--json").json
    assert [(one["version"], one["trajectories"]) for one in done["versions"]] == [(0, 5), (1, 6)]
    assert done["left_out"] == {"the run has no snapshot v2": 4}
    found = ask(lab.config.database, "SELECT trajectory, version, logprob, sampled_logprob, max_difference, "
                "logprobs FROM rescored_logprobs ORDER BY trajectory, version")  # fmt: skip
    assert [(id_, version) for id_, version, *_ in found][8:] == [(13, 1), (14, 0), (14, 1)]
    models = [AutoModelForCausalLM.from_pretrained(lab.config.snapshots / directory_name(n)) for n in (0, 1)]
    for id_, version, logprob, sampled, difference, blob in found:
        row = rows[id_ - 1]
        expected = by_a_plain_forward(models[version], row, row.sampling["temperature"])
        assert logprob == pytest.approx(expected, abs=1e-4)
        if id_ <= 8:
            assert (difference < 1e-4, sampled == pytest.approx(logprob, abs=1e-4)) == (True, True)
            assert np.allclose(np.frombuffer(blob, "<f4"), row.logprobs, atol=1e-4)


def test_a_repetition_scores_what_is_new_and_a_running_server_or_another_snapshot_is_refused(recorded, tba_here):
    lab, _, rescore = recorded
    first = rescore("--at", 1, "--where", "id <= 8", "--json").json
    assert [one["trajectories"] for one in first["versions"]] == [8]
    again = rescore("--at", 1, "--where", "id <= 9", "--json").json
    assert ([one["trajectories"] for one in again["versions"]], again["left_out"]) == ([9], {"scored already": 8})
    lab.buffer.start()
    assert "a buffer server has" in rescore().message
    lab.buffer.stop()
    shown = tba_here("buffer", "show", 1, "-b", lab.config.database).output
    ((logprob,),) = ask(lab.config.database, "SELECT logprob FROM rescored_logprobs WHERE trajectory = 1")
    assert f"rescored at v1 {logprob:.4g}" in " ".join(shown.split())
    (lab.config.snapshots / directory_name(0) / MANIFEST).write_text("{}")
    assert "does not hash to what was announced" in rescore("--at", 0).message


def test_a_row_without_a_prompt_or_of_another_run_is_left_out_and_a_foreign_token_is_named(recorded):
    lab, _, rescore = recorded
    change(
        lab.config.database,
        "UPDATE payloads SET prompt_ids = x'' WHERE trajectory = 1",
        "UPDATE trajectory_rows SET prompt_tokens = 0 WHERE id = 1",
        "UPDATE trajectory_rows SET policy_version = -1 WHERE id = 2",
    )
    left_out = rescore("--where", "id <= 4", "--json").json["left_out"]
    assert left_out == {"they have no prompt or no response": 1, "no version of this run sampled them": 1}
    foreign = np.full(2, 99_999, "<i4").tobytes()
    change(lab.config.database, ("UPDATE payloads SET prompt_ids = ? WHERE trajectory = 5", [foreign]))
    assert "trajectory 5 has token ids outside the model's vocabulary" in rescore("--where", "id = 5").message
