"""`tba sft` as a user runs it."""

import json
import signal
import time

from tba.common.config import Config
from tba.common.errors import EXIT_INTERRUPTED


def test_sft_makes_a_model_and_says_what_happens_as_json_lines(tba, example_model, tmp_path):
    data, out = tmp_path / "pairs.jsonl", tmp_path / "warm"
    data.write_text("".join(json.dumps({"prompt": f"{a}+11=", "answer": str(a + 11)}) + "\n" for a in range(10, 20)))
    command = ["sft", str(data), "--out", str(out), "--model", str(example_model), "--cpu", "--batch-size", "4"]
    result = tba(*command, "--epochs", "2", "--held-out", str(data), "--json")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["learning_rate"] for row in rows) == Config().train.learning_rate, "the warm-up fits five steps"
    assert "warmup" not in result.stderr + result.stdout
    assert "decay_steps" not in result.stderr
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss_before"]
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = tba(*command)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_sft_that_ctrl_c_has_stopped_is_no_success(start_tba, example_model, tmp_path):
    data, out = tmp_path / "pairs.jsonl", tmp_path / "warm"
    data.write_text("".join(json.dumps({"prompt": f"{a}+11=", "answer": str(a + 11)}) + "\n" for a in range(10, 20)))
    command = ["sft", str(data), "--out", str(out), "--model", str(example_model), "--cpu", "--json"]
    stopped = start_tba(*command, "--steps", "100000")
    deadline = time.monotonic() + 60
    while '"step"' not in (tmp_path / "tba0.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(60) == EXIT_INTERRUPTED
    assert not out.exists()
