"""`tba init`: the file that it writes, and what it refuses."""

import io

import pytest

from tba.common.config.layers import resolve
from tba.deploy.new_configuration import _data, _text, write_configuration
from tba.tests.helpers.hub import Hub, serve_hub


@pytest.mark.slow
def test_it_writes_a_configuration_that_passes_the_dry_run(tba_here, example_model, tmp_path):
    done = tba_here("init", "--model", example_model, "--cpu", "--name", "first")
    assert (done.exit_code, "start it with: tba run tba.toml" in done.output) == (0, True), done.message
    config = resolve(tmp_path / "tba.toml").config
    assert (config.run.name, config.search.engine, config.train.gpu) == ("first", "transformers", "cpu")
    again = tba_here("init", "--model", example_model, "--cpu")
    assert (again.exit_code, "tba.toml exists: name another file" in again.message) == (2, True)


@pytest.mark.slow
def test_a_problem_that_the_dry_run_finds_is_told_and_the_file_stays(tba_here, tmp_path):
    done = tba_here("init", "run.toml", "--model", "./nowhere", "--cpu")
    assert done.exit_code == 78
    assert "model.path ./nowhere does not exist" in " ".join(done.output.split())
    # Two checks say the same.
    assert done.message.count("\nmodel.path ./nowhere does not exist") == 1
    assert "run.toml is written: correct it, then try `tba run run.toml --dry-run`" in done.message
    assert (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "there is no terminal to ask for the model: pass --model"),
        (("--model", "m", "--task", "gsm8k"), "no terminal to ask for the data: pass --train-data"),
        (("--model", "m", "--task", "gsm8k", "--train-data", "a.jsonl"), "pass --test-data"),
        (("--model", "m", "--train-data", "a.jsonl"), "task arithmetic brings its prompts"),
        (("--model", "m", "--gpus", "0-6"), "0-6: name the GPUs of the searchers and of the trainer, such as 0-6:7"),
        (("--model", "m", "--gpus", ":1"), ":1: name the GPUs"),
        (("--model", "m", "--gpus", "0:1", "--cpu"), "--cpu and --gpus exclude each other"),
        (("--model", "m", "--cpu", "--task", "foo"), "task.name: no task has this name: use arithmetic, "),
        (("--model", "m", "--cpu", "--task", "mixture"), "nothing was written"),
        (("--model", "m", "--cpu", "--task", "foo.py"), "foo.py does not exist: `tba task new foo` writes one"),
        (("--model", "m\x7f", "--cpu"), "'m\\x7f' has characters that cannot be printed"),
        (("--model", "m\udcff", "--cpu"), "'m\\udcff' has characters that cannot be printed"),
    ],
)
def test_a_missing_answer_is_named_and_nothing_is_written(tba_here, tmp_path, flags, sentence):
    done = tba_here("init", *flags)
    assert done.exit_code == 2
    assert sentence in done.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("0-6", "7"), ("0", "0")])
def test_every_file_is_valid_and_keeps_what_was_answered(tmp_path, devices):
    file = tmp_path / "tba.toml"
    file.write_text(_text('a "b"\\c', "gsm8k", 'train = "t.jsonl"\n', devices, "n"))
    config = resolve(file).config
    assert (config.model.path, config.task.train) == ('a "b"\\c', "t.jsonl")
    assert (config.search.gpus, config.train.gpu) == devices
    assert config.buffer.samples_per_insert == 2
    # On a shared GPU, less than a half of the memory is for the engine.
    assert (config.search.gpu_memory_utilization < 0.5) == (devices == ("0", "0"))
    # Other columns only need a line uncommented.
    lines = _data("answers", "a.jsonl", "b.jsonl").replace("# options", "options")
    file.write_text(_text("m", "answers", lines, devices, "n"))
    assert resolve(file).config.task.options == {"prompt": "COLUMN", "answer": "COLUMN"}


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """Answers the questions of `tba init` on a terminal. Returns what is said there."""

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    def write(*answers: object, task: str | None = None, gpus: str | None = None) -> str:
        (tmp_path / "tba.toml").unlink(missing_ok=True)
        monkeypatch.setattr("sys.stdin", Typed("".join(f"{one}\n" for one in answers)))
        write_configuration(tmp_path / "tba.toml", None, task, (None, None), gpus, None)
        said: str = capsys.readouterr().err
        return said

    return write


def test_a_name_of_the_hub_is_checked_when_it_is_given_and_without_a_hub_that_is_said(
    answer, example_model, tmp_path, monkeypatch
):
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", tmp_path / "cache")
    with serve_hub(Hub({"org/tiny": example_model})) as hub:
        monkeypatch.setattr(f"{constants}.ENDPOINT", hub.address)
        pages = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", pages)
        said = answer("org/none", "org/tiny", task="arithmetic", gpus="cpu")
        assert "'org/none' is neither a directory nor a model the hub gives" in said
        assert "not checked" not in said
    # Nothing answers there.
    monkeypatch.setattr(f"{constants}.ENDPOINT", "http://127.0.0.1:9")
    said = answer("org/other", task="arithmetic", gpus="cpu")
    assert "not checked: model.path 'org/other' is not a local directory, and it cannot be downloaded" in said
    assert 'path = "org/other"' in (tmp_path / "tba.toml").read_text()


def test_an_answer_on_a_terminal_is_checked_when_it_is_given(answer, example_model, tmp_path):
    said = answer("", tmp_path / "nope", example_model, tmp_path, "arithmetic", "0-6", "cpu")
    assert f'path = "{example_model}"' in (tmp_path / "tba.toml").read_text()
    words = ("this has no default", "nope", f"--task {tmp_path} is none of", "0-6: name the GPUs")
    assert [word in said for word in words] == [True] * 4
