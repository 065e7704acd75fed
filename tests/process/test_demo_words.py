"""`make demo-words`: warm start and run on word problems, at a small size."""

import json
import re
from pathlib import Path

import pytest

from tba.common.config import TaskSection
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks import load_task
from tba.tests.process.conftest import ROOT, changed, free_port, run_example
from tba.tests.process.test_demo import check_gain
from tba.tests.runner import FULL_SIZE, size

CONFIG = "examples/words/demo.toml"
WARM_START = "--batch-size 16"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """What prepare.py writes, and its pairs."""
    directory = tmp_path_factory.mktemp("words") / "start"
    run_example("words/prepare.py", "--out", directory, *size(("--pairs", "400"), ()))
    return directory, [json.loads(line) for line in (directory / "pairs.jsonl").read_text().splitlines()]


def test_the_pairs_are_solutions_of_which_many_misread_an_event(prepared):
    from transformers import AutoTokenizer

    directory, pairs = prepared
    task = load_task(TaskSection(name=str(ROOT / "examples/words/words.py")))
    prompts = {prompt.text: prompt for prompt in task.prompts()}
    held_out = {prompt.text for prompt in task.held_out()}
    assert held_out.isdisjoint(prompts.keys() | {pair["prompt"] for pair in pairs})
    totals = [score(task, prompts[pair["prompt"]], pair["response"], True)[0].total for pair in pairs]
    assert 0.4 < sum(totals) / len(totals) < 0.9
    misread = [pair["response"] for pair, total in zip(pairs, totals, strict=True) if not total]
    assert all(re.search("sells|gives", response) for response in misread)
    tokenizer = AutoTokenizer.from_pretrained(directory / "untrained")
    ids = [tokenizer.encode(pair["response"]) for pair in pairs]
    assert tokenizer.batch_decode(ids) == [pair["response"] for pair in pairs]
    assert tokenizer.unk_token_id not in {token for row in ids for token in row}
    assert 20 < sum(map(len, ids)) / len(ids) < 50


def test_the_demo_of_word_problems_gains_from_an_untrained_model(prepared, tba, tba_here, tmp_path):
    """In full size 30 points on held-out problems. Small, the warm start learns, and the run would start."""
    assert WARM_START in (ROOT / "Makefile").read_text()
    start, directory = prepared[0], tmp_path / "demo"
    sft = tba_here(
        "sft", start / "pairs.jsonl", "--config", ROOT / CONFIG, "--model", start / "untrained",
        "--out", start / "model", *WARM_START.split(), *size(("--steps", "8"), ()),
    )  # fmt: skip
    assert sft.exit_code == 0, sft.message
    losses = [json.loads(line)["loss"] for line in (start / "model/sft_metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    sets = changed(
        f"run.dir={directory}", f"model.path={start / 'model'}", f"buffer.address=tcp://127.0.0.1:{free_port()}"
    )
    if not FULL_SIZE:
        name = f"task.name={ROOT / 'examples/words/words.py'}"
        assert "this run would start" in tba_here("run", ROOT / CONFIG, *sets, *changed(name), "--dry-run").output
        return
    result = tba("run", CONFIG, *sets, timeout=900, cwd=ROOT)
    check_gain(result, directory, points=30)
    # Of the 42 % that a perfect student of the pairs reaches. Less means a warm start that has not converged.
    assert json.loads((directory / "eval.jsonl").read_text().splitlines()[0])["accuracy"] > 0.36
