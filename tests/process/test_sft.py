"""`tba sft` on the command line."""

import dataclasses
import json
import signal
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tba.common.config import Config
from tba.common.errors import EXIT_INTERRUPTED
from tba.common.wire import messages
from tba.tests.helpers.checks import wait_until


@pytest.fixture
def pairs(tmp_path):
    """A file of ten prompts with answers."""
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{a}+11=", "answer": str(a + 11)}) + "\n" for a in range(10, 20)))
    return str(file)


def test_sft_writes_a_model_and_reports_steps_as_json_lines(tba_here, pairs, example_model, tmp_path):
    out = tmp_path / "warm"
    command = ["sft", pairs, "--out", str(out), "--model", str(example_model), "--cpu", "--batch-size", "4"]
    result = tba_here(*command, "--epochs", "2", "--held-out", pairs, "--json")
    assert result.exit_code == 0, result.message
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["learning_rate"] for row in rows) == Config().sft.learning_rate, "the warm-up fits five steps"
    assert "warmup" not in result.message + result.output
    assert "decay_steps" not in result.message
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss_before"]
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = tba_here(*command)
    assert (again.exit_code, "exists already" in again.message) == (2, True)
    assert "use --learning-rate" in tba_here(*command, "--set", "train.learning_rate=1e-3").message


def test_the_best_responses_of_a_run_are_exported_and_trained_on(
    tba_here, harness, trajectory, example_model, tmp_path
):
    buffer, encode = harness(), AutoTokenizer.from_pretrained(example_model).encode
    known: Any = {"task": "t", "fingerprint": "0" * 64, "total": 1, "offset": 0}
    buffer.ask(messages.RegisterPrompts(**known, keys=["a"], texts=["1+2="], answers=["3"]))
    buffer.announce(0, 0)
    (visit,) = buffer.lease(1).visits
    for n, response in enumerate("23"):
        row = trajectory("a", visit.lease, tokens=[*encode(response), 1], text=response, reward=float(n))
        buffer.put([dataclasses.replace(row, prompt_ids=np.array(encode("1+2="), np.int32))], n)
    where = ["--where", "reward = 1 AND stop_reason = 'eos'"]
    assert tba_here("buffer", "export", "best.jsonl", *where, "-b", buffer.store.path).exit_code == 0
    (row,) = map(json.loads, (tmp_path / "best.jsonl").read_text().splitlines())
    columns = ("prompt", "answer", "text", "prompt_tokens", "response_tokens")
    assert [row[name] for name in columns] == ["1+2=", "3", "3", 4, 2]
    trained = ["sft", "best.jsonl", "--out", "warm", "--model", example_model, "--cpu", "--steps", "2", "--json"]
    steps = [json.loads(line) for line in tba_here(*trained).output.splitlines()]
    assert ([step["tokens"] for step in steps], (tmp_path / "warm/config.json").is_file()) == ([64 * 6] * 2, True)


def test_sft_interrupted_by_ctrl_c_exits_with_an_error(start_tba, pairs, example_model, tmp_path):
    out = tmp_path / "warm"
    command = ["sft", pairs, "--out", str(out), "--model", str(example_model), "--cpu", "--json"]
    stopped = start_tba(*command, "--steps", "100000")
    wait_until(lambda: '"step"' in (tmp_path / "tba0.log").read_text())
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(60) == EXIT_INTERRUPTED
    assert not out.exists()


def test_two_processes_that_are_stopped_resume_with_the_losses_of_an_uninterrupted_training(
    tba, tba_here, start_tba, pairs, example_model, tmp_path
):
    out, straight = tmp_path / "warm", tmp_path / "straight"
    common = ("sft", pairs, "--model", str(example_model), "--cpu", "--batch-size", "4", "--steps", "30")
    two = (*common, "--out", str(out), "--set", "train.processes=2", "--set", "train.offload=optimizer")
    assert tba_here(*common, "--out", straight).exit_code == 0
    stopped, metrics = start_tba(*two), tmp_path / "warm.work/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 0
    assert not out.exists()
    assert tba(*two, "--resume").returncode == 0
    found, expected = (
        [json.loads(line)["loss"] for line in (model / "sft_metrics.jsonl").read_text().splitlines()]
        for model in (out, straight)
    )
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    refused = tba_here(*two, "--out", tmp_path / "other", "--json")
    assert (refused.exit_code, "--json is for one process" in refused.message) == (2, True)
