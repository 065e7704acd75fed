"""The configuration: layers, origins, and one sentence per mistake."""

import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tba.common.config import Config
from tba.common.config.layers import as_toml, fields, removed, resolve, secret_keys, value_of
from tba.common.config.paths import check_data, check_directories, check_gpus_apart, nearest_existing
from tba.common.config.search import SearchSection, check_arguments, installed_arguments
from tba.common.errors import ConfigError, problems
from tba.common.system.devices import Gpu
from tba.tests.helpers.users import closed_directory

ROOT = Path(__file__).parents[3]
NOT_UTF8 = os.fsdecode(b"h\xe4user")


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def refusal(file: Path | None = None, **arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(file, environment=arguments.pop("environment", {}), **arguments)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_a_removed_key_is_refused_with_what_is_in_its_place(tmp_path):
    known = {key for key, _ in fields()}
    for key, instead in removed()["keys"].items():
        name = key if "." in key else f"{key}.any"
        assert name not in known
        assert refusal(assignments=[f"{name}=1"]) == f"{name} (--set) is no longer a key: {instead}"
    # A file of an earlier build names all of them at once.
    file = write(tmp_path, "[train]\nprefetch = 2\nkeep_checkpoints = 3")
    assert refusal(file).count("is no longer a key") == 2


def test_flag_wins_over_environment_over_file_over_default(tmp_path):
    file = write(tmp_path, "[train]\nsteps = 1\nlearning_rate = 1.0\nbeta = 1.0")
    resolved = resolve(
        file,
        environment={"TBA_TRAIN__STEPS": "2", "TBA_TRAIN__LEARNING_RATE": "2.0"},
        overrides={"train.steps": 3, "train.gpu": None},
    )
    assert (resolved.config.train.steps, resolved.config.train.learning_rate, resolved.config.train.beta) == (3, 2, 1)
    origins = [resolved.origin(f"train.{key}") for key in ("steps", "learning_rate", "beta", "gpu")]
    assert origins == ["command line", "TBA_TRAIN__LEARNING_RATE", str(file), "default"]
    config = resolve(None, environment={}, assignments=["train.adam_betas=[0.8, 0.9]", "search.gpus=cpu"]).config
    assert (config.train.adam_betas, config.search.gpus) == ((0.8, 0.9), "cpu"), "values are parsed as TOML"


HINTS = {
    "train.spool_mib": "did you mean search.spool_mib?",
    "trian.learning_rate": "did you mean train.learning_rate?",
    "train.warmup_step": "did you mean train.warmup_steps?",
    "train.objective": "`tba config show` lists all keys",
    "buffer.port": "`tba config show` lists all keys",
    "learning_rate": "did you mean train.learning_rate or sft.learning_rate?",
    "rtain.samples_per_prompt": "did you mean train.samples_per_prompt?",
    "bojective.name": "did you mean objective.name?",
    "erward_model.path": "did you mean reward_model.path?",
    "train.gpus": "did you mean train.gpu?",
}


@pytest.mark.parametrize(("key", "hint"), HINTS.items())
def test_the_hint_names_a_similar_key_or_none(key, hint):
    assert refusal(assignments=[f"{key}=1"]) == f"unknown key {key} (--set): {hint}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[train]\nsteps = "many"', "train.steps = 'many' ("),
        ("[train\n", "line 1"),
        ("steps = 3", "`steps` is outside a section"),
    ],
)
def test_the_error_of_a_wrong_file_names_the_place(tmp_path, text, words):
    assert words in refusal(write(tmp_path, text))


def test_what_is_in_the_place_of_a_file_or_a_variable_is_refused_with_what_to_type(tmp_path):
    assert "pass a task as --set task.name=doubling.py" in refusal(Path("doubling.py"))
    assert f"name the TOML file of the run, and the directory with --set run.dir={tmp_path}" in refusal(tmp_path)
    sqlite3.connect(tmp_path / "b.sqlite").execute("CREATE TABLE t (a)").connection.close()
    assert f"`tba buffer stats {tmp_path}/b.sqlite`" in refusal(tmp_path / "b.sqlite")
    assert "TBA_TRAIN__STEP" in refusal(environment={"TBA_TRAIN__STEP": "3"})


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["train.steps"], "section.key=value"),
        (["buffer.max_staleness=0", "train.publish_every=2"], "publish_every"),
        (["task.name=gsm8k"], "task.train"),
        (["search.stop=Question:"], "write a list of strings and token ids"),
        (["search.stop=[-1]"], "write a list of strings and token ids"),
        (["task.truncated=drop"], 'write "score", "mask", or the reward'),
        (["task.template=raw", "task.system=Be brief."], 'have no effect with task.template = "raw": remove them'),
        (["task.name=arithmetik"], "use arithmetic, "),
        ([f"run.dir={NOT_UTF8}"], "is not a UTF-8 name here"),
        (["search.max_in_flight=lots"], "; or 'auto'"),
        (["buffer.max_staleness=-1"], "; or 'unbounded'"),
        (["eval.kl=true"], "eval.kl measures sampled responses, and eval.samples is 0"),
        # A group that fits no message.
        (["search.samples_per_prompt=4097"], "at most 4096"),
        (["train.prompts_per_step=10000"], "of train.samples_per_prompt = 20 trajectories: a batch has at most 65536"),
        (["search.samples_per_prompt=1025", "search.max_tokens=8192"], "8396800 tokens, and a message has room for"),
        # Engine arguments that tba sets.
        (["search.vllm={model='x'}"], "model cannot be set here: set model.path"),
        (["search.vllm={max_num_seqs=8}"], "max_num_seqs cannot be set here: set search.max_in_flight"),
        (["search.vllm={logprobs_mode='raw_logprobs'}"], "those of the distribution that was sampled from"),
        (["search.vllm={seed=1}"], "set run.seed"),
        (["search.vllm={data_parallel_size=2}"], "an engine runs on the search.tensor_parallel GPUs"),
    ],
)
def test_the_error_of_a_wrong_assignment_names_the_remedy(assignments, words):
    assert words in refusal(assignments=assignments)
    # The largest group that fits.
    resolve(None, environment={}, assignments=["search.samples_per_prompt=1024", "search.max_tokens=8192"])


@pytest.mark.parametrize("key", sorted(key.upper().replace(".", "__") for key in secret_keys()))
def test_the_error_of_a_secret_does_not_show_it(key):
    sentence = refusal(environment={f"TBA_{key}": "hooks.example/SECRET é"})
    assert "(not shown)" in sentence
    on_command_line = refusal(assignments=[f"{key.lower().replace('__', '.')} = SECRET-0123456789"])
    assert f"others can read a command line: set TBA_{key}, or" in on_command_line
    assert "SECRET" not in sentence + on_command_line


@pytest.mark.parametrize(
    ("serve", "address"),
    [("8400", ("127.0.0.1", 8400)), ("localhost:0", ("localhost", 0)), ("[::1]:8400", ("::1", 8400))],
)
def test_an_endpoint_on_loopback_needs_no_token_and_any_other_one_of_sixteen_characters(serve, address):
    assert resolve(None, environment={}, assignments=[f"search.serve={serve}"]).config.search.serve_address == address
    for host in ("0.0.0.0", "node7", "[::]", "127.0.0.1.example.org"):
        assert "set search.serve_token" in refusal(assignments=[f"search.serve={host}:{address[1]}"])
    token, open_to_all = {"TBA_SEARCH__SERVE_TOKEN": "0123456789abcde"}, ["search.serve=0.0.0.0:8400"]
    sentence = refusal(assignments=open_to_all, environment=token)
    assert "at least 16 characters" in sentence
    assert "0123456789" not in sentence
    longer = {name: f"{value}f" for name, value in token.items()}
    assert resolve(None, environment=longer, assignments=open_to_all).config.search.serve
    assert "search.serve" in refusal(assignments=["search.serve=node7:port"])


@pytest.mark.parametrize("text", ["2026-11-23", "1e5", "true", "007", '"a"'])
def test_what_looks_like_another_type_is_a_text_and_a_secret_keeps_its_quotes(text):
    name, environment = text.strip('"'), {"TBA_RUN__NAME": text, "TBA_REWARD_MODEL__API_KEY": text}
    config = resolve(None, environment=environment).config
    assert (config.run.name, config.reward_model.api_key.get_secret_value()) == (name, text)
    assert resolve(None, environment={}, assignments=[f"run.name={text}"]).config.run.name == name
    assert resolve(None, environment={}, assignments=[f"run.dir={text}"]).config.run.dir == Path(name)


def test_all_mistakes_are_named_together(tmp_path):
    text = '[train]\nsteps = "many"\nstep = 3\ngpu = "x y"\n[search]\ntemperature = "warm"\n[task]\nname = "gsm8k"'
    sentence = refusal(write(tmp_path, text), assignments=["run.nam=a", "train.steps=0"])
    start, *parts = re.split(r"\(\d\) ", sentence)
    assert start == f"{len(parts)} mistakes: "
    named = [part.removeprefix("unknown key ").split()[0] for part in parts]
    assert named == ["train.step", "run.nam", "search.temperature", "train.gpu", "train.steps"]
    assert "train.steps = 0 (--set)" in sentence
    sections = refusal(write(tmp_path, "[trian]\nsteps = 3\nbeta = 1\n[gold_model]\npath = 1\n[run]\nnmae = 3"))
    assert sections.startswith("3 mistakes: (1) unknown key trian.steps (")
    assert "gold_model.path" in sections
    many = refusal(assignments=[f"run.x{number}=1" for number in range(13)])
    assert (many.count("unknown key"), many.endswith("; and 3 more")) == (10, True)


def test_an_unrelated_variable_is_a_warning(capsys):
    assert resolve(None, environment={"TBA_HOME": "/srv/tba"}).origins == {}
    assert "TBA_HOME sets nothing" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["buffer.address", "train.serve_snapshots"])
def test_the_path_of_a_socket_may_have_spaces(key):
    assert value_of(resolve(None, assignments=[f"{key}=ipc:///my runs/a"]).config, key) == "ipc:///my runs/a"
    assert key in refusal(assignments=[f"{key}=ipc:// "])


def test_a_directory_whose_name_the_locale_does_not_have_is_refused_with_the_remedy(tmp_path):
    write(tmp_path, '[run]\ndir = "h\\u00E4user"')
    # With that locale the path of the clone may not be found either.
    (tmp_path / "tba").symlink_to(ROOT)
    code = "from pathlib import Path; from tba.common.config.layers import resolve; resolve(Path('run.toml'))"
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True)
    assert b"ConfigError: run.dir '" in done.stderr
    assert b"file names are ascii: set PYTHONUTF8=1" in done.stderr


def test_engine_arguments_pass_through_as_a_table_from_every_layer(tmp_path):
    asked = {"kv_cache_dtype": "fp8", "speculative_config": {"method": "ngram"}}
    file = write(tmp_path, '[search.vllm]\nkv_cache_dtype = "fp8"\nspeculative_config = { method = "ngram" }')
    assert resolve(file, environment={}).config.search.vllm == asked
    text = '{ kv_cache_dtype = "fp8", speculative_config = { method = "ngram" } }'
    assert resolve(None, environment={}, assignments=[f"search.vllm={text}"]).config.search.vllm == asked
    assert resolve(None, environment={"TBA_SEARCH__VLLM": text}).config.search.vllm == asked


def test_every_field_is_documented():
    assert [key for key, field in fields() if not field.description] == []


def test_the_run_by_hand_is_the_demo_in_another_directory():
    demo, by_hand = (resolve(ROOT / f"examples/arithmetic/{name}.toml", environment={}) for name in ("demo", "by-hand"))
    assert by_hand.config.model_copy(update={"run": demo.config.run}) == demo.config
    assert by_hand.config.run.dir != demo.config.run.dir


def test_a_key_inside_a_table_changes_that_key_alone(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[task]\nname = "own.py"\noptions = { path = "a", size = 3 }\n')
    assignments = ["task.options.path=b", "search.vllm.max_logprobs=7", "task.options.deep={ x = 1 }"]
    resolved = resolve(file, environment={}, assignments=assignments)
    assert resolved.config.task.options == {"path": "b", "size": 3, "deep": {"x": 1}}
    assert resolved.config.search.vllm == {"max_logprobs": 7}
    assert (resolved.origin("task.options"), resolved.origin("task.name")) == ("--set", str(file))
    assert "task.options" not in resolved.partial
    nested = ["task.options.deep.x=2", "task.options.deep.y=3", "task.options.path=c"]
    without_file = resolve(None, environment={}, assignments=nested)
    assert without_file.config.task.options == {"deep": {"x": 2, "y": 3}, "path": "c"}
    recorded = {"task.options": {"deep": {"x": 1, "z": 4}, "size": 3}}
    assert without_file.over(recorded, "recorded", needs="run").task.options == {
        "deep": {"x": 2, "y": 3, "z": 4},
        "size": 3,
        "path": "c",
    }
    later = resolve(None, environment={}, assignments=["task.options.a=1", "task.options={ a = 2 }"])
    assert later.config.task.options == {"a": 2}
    assert "unknown key task.options. (--set)" in refusal(assignments=["task.options.=1"])
    file.write_text('[task]\nname = "own.py"\noptions = "a"\n')
    assert "task.options" in refusal(file, assignments=["task.options.path=b"])


def test_names_of_engine_arguments_are_checked_where_vllm_is_installed(tmp_path, monkeypatch):
    (tmp_path / "vllm/engine").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert installed_arguments() == []
    (tmp_path / "vllm/engine/arg_utils.py").write_text(
        "class EngineArgs:\n    model: str = 'm'\n    block_size: int = 1\n"
    )
    assert installed_arguments() == ["model", "block_size"]
    with pytest.raises(ConfigError, match="no engine argument 'blok_size': did you mean block_size"):
        check_arguments({"block_size": 1, "blok_size": 2}, installed_arguments())


def test_a_gpu_of_both_roles_is_refused_on_one_machine_and_noted_on_a_network(monkeypatch):
    def checked(
        search: str, train: str, *, address: str = "tcp://127.0.0.1:5757", share: float = 0.9, here: int = 0, other=""
    ):
        search_section = {"gpus": search, "gpu_memory_utilization": share}
        settings = {"search": search_section, "train": {"gpu": train}, "eval": {"gpu": other}}
        config = Config.model_validate({"task": {"train": "t"}, "buffer": {"address": address}, **settings})
        return check_gpus_apart(config, [Gpu(str(index)) for index in range(here)])

    assert checked("0-6", "7") == checked("cpu", "0") == checked("0-7", "7", share=0.4) == checked("all", "0") == []
    assert checked("0-7", "4-7", address="tcp://node0:5757") == [
        "search.gpus = 0-7 and train.gpu = 4-7 both name GPU 4, 5, 6, 7: they must be on different nodes"
    ]
    with pytest.raises(ConfigError, match="both name GPU 7: name different ones"):
        checked("0-7", "7")
    with pytest.raises(ConfigError, match="eval.gpu = 7 and train.gpu = 7 both name GPU 7"):
        checked("0-5", "7", other="7")
    assert checked("0-5", "7", other="6") == checked("0-5", "7", other="cpu") == []
    # One GPU: there is no other for the searcher. With more, `all` leaves out the trainer's.
    with pytest.raises(ConfigError, match="both name GPU 0"):
        checked("all", "0", address="tcp://node0:5757", here=1)
    assert checked("all", "0", here=2) == checked("all", "0", share=0.4, here=1) == []
    with pytest.raises(ConfigError, match="both name GPU 0, 1:"):
        checked("all", "all", here=2)


def test_a_path_in_a_directory_without_access_is_not_writable():
    with closed_directory(0o000) as closed:
        config = Config.model_validate({"run": {"dir": closed / "runs/one"}})
        with pytest.raises(PermissionError):
            (closed / "runs").exists()
        with pytest.raises(ConfigError, match=f"run.dir .*/one is not writable: {re.escape(str(closed))} belongs"):
            check_directories(config)
        assert nearest_existing(config.run.dir) == closed


def test_prompt_files_are_checked_only_for_a_task_that_reads_them():
    keys = {"train": "missing.jsonl", "test": "missing.json"}
    check_data(Config.model_validate({"task": keys}).task)
    check_data(Config.model_validate({"task": keys | {"name": "my.own:task"}}).task)


@pytest.mark.parametrize("value", [True, 3, 1e-05, 'a "b"', [1, "x"], {"a": {"b": False}, "c": ["d"]}, {}])
def test_a_value_is_written_as_a_file_has_it(value):
    assert tomllib.loads(f"x = {as_toml(value, quoted=True)}") == {"x": value}


FORMS = [
    ("search.gpus", "0-", "cpu, all, or numbers"), ("search.gpus", "", "cpu, all, or numbers"),
    ("search.gpus", "0;1", "cpu, all, or numbers"), ("train.gpu", "cuda:0", "cpu, all, or numbers"),
    ("search.gpus", "0,,1", "cpu, all, or numbers"), ("eval.gpu", "x", "cpu, all, or numbers"),
    ("search.serve", "http://a:1", "PORT or HOST:PORT"), ("search.serve", "80\n", "PORT or HOST:PORT"),
    ("search.serve_snapshots", "udp://x:1", "tcp://HOST:PORT"), ("train.serve_snapshots", "a:1", "tcp://HOST:PORT or"),
    ("buffer.address", "localhost:1", "auto, tcp://HOST:PORT or ipc://PATH"), ("run.name", "a b", "1 to 100 letters"),
    ("run.name", "", "1 to 100 letters"), ("metrics.prometheus", "0", "PORT or HOST:PORT"),
    ("reward_model.device", "cuda", "auto, cpu or cuda:NUMBER"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "form"), FORMS)
def test_a_text_of_another_form_is_refused_with_the_form_and_no_regular_expression(key, value, form):
    section, _, name = key.partition(".")
    with pytest.raises(ValidationError) as refused:
        Config.model_validate({section: {name: value}})
    ((path, reason),) = problems(refused.value)
    assert path[:2] == (section, name)
    assert reason.startswith(f"it must be {form}")
    assert not re.search(r"\\[dSw]|\^\(", reason)


def test_the_forms_of_a_list_of_gpus_are_read():
    for value in ("cpu", "all", "0", "0-6", "0,2,4", "0-1,4", "GPU-1a2b", "MIG-3,GPU-4", "0,"):
        assert Config.model_validate({"search": {"gpus": value}}).search.gpus == value


# Of a thousand tokens that are nearly equally probable: whether one alone is left to sample from.
@pytest.mark.parametrize(
    ("keys", "greedy"),
    [
        ({}, False), ({"temperature": 0}, True), ({"top_k": 1}, True), ({"top_k": 2}, False), ({"min_p": 1}, True),
        ({"min_p": 0.99}, False), ({"top_p": 1e-9}, True), ({"top_p": 0.01}, False), ({"top_p": [1e-9, 1]}, False),
        ({"temperature": [0, 1]}, False), ({"temperature": [0, 1], "top_k": 1}, True), ({"temperature": 0.01}, False),
    ],
)  # fmt: skip
def test_greedy_is_every_setting_under_which_the_most_probable_token_is_the_only_one(keys, greedy):
    assert SearchSection.model_validate(keys).is_greedy == greedy
    logits = -1e-6 * np.arange(1000)
    kept = 1
    for temperature in np.atleast_1d(keys.get("temperature", 1.0)):
        for top_p in np.atleast_1d(keys.get("top_p", 1.0)):
            scaled = np.exp((logits - logits.max()) / temperature) if temperature else np.eye(1000)[0]
            probability = np.sort(scaled / scaled.sum())[::-1]
            probability = probability[: keys.get("top_k") or None]
            probability = probability[probability >= keys.get("min_p", 0.0) * probability[0]]
            before = np.concatenate([[0.0], np.cumsum(probability / probability.sum())[:-1]])
            kept = max(kept, int(np.count_nonzero((before < top_p) & (probability > 0))))
    assert (kept == 1) == greedy
