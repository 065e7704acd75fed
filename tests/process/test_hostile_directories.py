"""Directories that were made to hurt: no code of theirs runs, nothing hangs, crashes, deletes or shows a traceback.

Run as a program with a kind and an empty folder, this file makes each case, runs the commands on it in this process,
and prints a JSON line for each: [case, command, what was wrong]. An alarm ends a command that waits.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tba.common import run_files
from tba.common.config import Config
from tba.common.errors import TbaError
from tba.common.weights import snapshot
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.buffer import ServiceHarness
from tba.tests.process.conftest import clean_environment

LIMIT_SECONDS = 100
DEEP = "[" * 100_000
CRASHING = "json_set('{}', '$.' || replace(hex(zeroblob(100000)), '00', 'a.'), 1)"
CPU = ("--set", "search.engine=transformers", "--set", "search.gpus=cpu", "--set", "train.gpu=cpu")
FEW = ("--set", "task.held_out_limit=4")
Commands = dict[str, Callable[[Path], object]]


class TooLong(BaseException):
    """A command has reached its limit."""


# ------------------------------------------------------------ databases


def sql(*statements: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with contextlib.closing(sqlite3.connect(run / run_files.DATABASE)) as connection:
            for statement in statements:
                connection.executescript(statement)

    return change


def in_place(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Put something else in the place of a file of the run."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        make(run / name)

    return change


def link_to_precious(path: Path) -> None:
    path.symlink_to(path.parents[1] / "precious")


def super_journal(path: Path) -> None:
    """A hot journal that names a file of someone else as its super-journal, which SQLite deletes after a rollback."""
    name = str(path.parents[1] / "precious").encode()
    header = bytes.fromhex("d9d505f920a163d7") + b"".join(n.to_bytes(4, "big") for n in (0, 0, 1, 512, 4096))
    trailer = (1 << 22).to_bytes(4, "big") + name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big")
    path.write_bytes(header.ljust(512, b"\0") + trailer + bytes.fromhex("d9d505f920a163d7"))


def unused_wal(run: Path) -> None:
    """A write-ahead log of random frames."""
    (run / f"{run_files.DATABASE}-wal").write_bytes(bytes.fromhex("377f0682002de218") + os.urandom(100_000))


FILE = run_files.DATABASE
DATABASES: dict[str, Callable[[Path], object]] = {
    "a view with a trigger in place of the runs": sql(
        "ALTER TABLE runs RENAME TO kept; CREATE VIEW runs AS SELECT * FROM kept;"
        "CREATE TRIGGER t INSTEAD OF INSERT ON runs BEGIN DELETE FROM kept; END"
    ),
    "a generated column that crashes SQLite": sql(f"ALTER TABLE runs ADD COLUMN c TEXT AS ({CRASHING})"),
    "an index on an expression that crashes SQLite": sql(f"CREATE INDEX i ON starts (({CRASHING})) WHERE 0"),
    "a virtual table": sql("CREATE VIRTUAL TABLE v USING fts5(x)"),
    "text of 16 MB": sql("UPDATE trajectory_rows SET text = printf('%.*c', 16000000, 'x') WHERE id = 1"),
    "lists nested in reward parts": sql(f"UPDATE trajectory_rows SET reward_parts = '{DEEP}'"),
    "lists nested in the configuration": sql(f"UPDATE starts SET config = '{DEEP}'"),
    "a configuration of other types": sql("""UPDATE starts SET config = '{"buffer": 1, "run": [], "train": "x"}'"""),
    "metrics that are no numbers": sql(
        """UPDATE batches SET metrics = '{"loss": "x", "reward_mean": 1e999, "a": []}'"""
    ),
    "numbers at the ends of their range": sql(
        "UPDATE trajectory_rows SET received_at = 1e308, reward = -1e308;UPDATE batches SET step = -9223372036854775808"
    ),
    "a name of a run with escapes and 60,000 dots": sql(
        "UPDATE runs SET name = '../' || char(27) || hex(zeroblob(30000))"
    ),
    "a directory in place of the file": in_place(FILE, Path.mkdir),
    "a FIFO in place of the file": in_place(FILE, os.mkfifo),
    "a device in place of the file": in_place(FILE, lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": in_place(FILE, lambda path: path.symlink_to(path)),
    "a FIFO in place of the log": in_place(f"{FILE}-wal", os.mkfifo),
    "a FIFO in place of the journal": in_place(f"{FILE}-journal", os.mkfifo),
    "a FIFO in place of the lock": in_place(f"{FILE}.lock", os.mkfifo),
    "a log that is a link to another file": in_place(f"{FILE}-wal", link_to_precious),
    "a journal that deletes another file": in_place(f"{FILE}-journal", super_journal),
    "a log of random frames": unused_wal,
}


def filled_run(run: Path) -> None:
    """A run with two prompts, their responses, and one step."""
    buffer = ServiceHarness(run / FILE, Config.model_validate({"train": {"prompts_per_step": 2}}))
    buffer.fill(2, 3)
    buffer.sample(0, prompts=2, samples=3)
    buffer.report(0)
    buffer.store.close()


def tba(*arguments: str) -> Callable[[Path], object]:
    """A command; RUN in its arguments is the directory."""

    def run(directory: Path) -> object:
        import typer.testing

        from tba.cli import app

        given = [one.replace("RUN", str(directory)) for one in arguments]
        result = typer.testing.CliRunner().invoke(app, given)
        assert "Usage:" not in result.stderr, result.stderr
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def open_to_write(run: Path) -> None:
    """What `tba buffer serve` does first."""
    from tba.buffer.store.store import Store

    Store(run / FILE, durability="process").close()


def open_pages(run: Path) -> None:
    from starlette.testclient import TestClient

    from tba.ui.app import make_app

    browser = TestClient(make_app([run]), base_url="http://127.0.0.1:5780", raise_server_exceptions=False)
    for page in ("", "/charts.json", "/config", "/steps", "/prompts", "/trajectories?words=answer", "/trajectories/1"):
        found = browser.get(f"/r/test{page}")
        assert found.status_code != 500, f"{page}: {found.text[-300:]}"


READ_A_DATABASE: Commands = {
    "buffer stats": tba("buffer", "stats", "-b", f"RUN/{FILE}"),
    "buffer show": tba("buffer", "show", "1", "-b", f"RUN/{FILE}"),
    "buffer check": tba("buffer", "check", "-b", f"RUN/{FILE}"),
    "buffer query": tba("buffer", "query", "SELECT * FROM trajectories", "--json", "-b", f"RUN/{FILE}"),
    "buffer export": tba("buffer", "export", "RUN/../out.jsonl", "--force", "-b", f"RUN/{FILE}"),
    "runs": tba("runs", "RUN"),
    "report": tba("report", "RUN", "--out", "RUN/../report.html"),
    "status": tba("status", "--set", "run.dir=RUN"),
    "ui": open_pages,
    "buffer serve": open_to_write,
}

# ------------------------------------------------------------ models


def config(**values: Any) -> Callable[[Path], None]:
    return json_of("config.json", **values)


def json_of(name: str, **values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        written = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(written | values))

    return change


def tokenizer(**values: Any) -> Callable[[Path], None]:
    return json_of("tokenizer.json", **values)


def pickled(model: Path) -> None:
    """Weights as a pickle that writes a file."""
    (model / "model.safetensors").unlink()
    command = f"touch {model.parent / 'ran'}"
    (model / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'{command}'\ntR.".encode())


def short_index(model: Path) -> None:
    shutil.move(model / "model.safetensors", model.parent / "outside.safetensors")
    written = {"weight_map": {"a": "../outside.safetensors", "b": "/dev/zero"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(written))


MODELS: dict[str, Callable[[Path], object]] = {
    "a fraction of a layer": config(num_hidden_layers=1.5),
    "heads that are a text": config(num_attention_heads="many"),
    "a vocabulary of a billion": config(vocab_size=10**9),
    "a hidden size of 0": config(hidden_size=0),
    "a list as the model type": config(model_type=["llama"]),
    "a position limit that is negative": config(max_position_embeddings=-1),
    "weights as a pickle": pickled,
    "an index that leads out of the directory": short_index,
    "a FIFO in place of the configuration": in_place("config.json", os.mkfifo),
    "a FIFO in place of the tokenizer": in_place("tokenizer.json", os.mkfifo),
    "a FIFO in place of the weights": in_place("model.safetensors", os.mkfifo),
    "a device in place of the generation config": in_place(
        "generation_config.json", lambda path: path.symlink_to("/dev/zero")
    ),
    "a tokenizer nested 100,000 deep": in_place("tokenizer.json", lambda path: path.write_text(DEEP)),
    "a vocabulary of other types": tokenizer(model={"type": "BPE", "vocab": [1, None], "merges": 5}),
    "a template that reaches for the system": json_of(
        "tokenizer_config.json",
        chat_template="{{ ''.__class__.__mro__[1] }}{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    ),
}


def load(kind: str) -> Callable[[Path], object]:
    def run(model: Path) -> object:
        import torch

        from tba.common.weights.model_files import eos_ids, weights_digest
        from tba.common.weights.pretrained import load_tokenizer
        from tba.trainer.model.scorer import load_model
        from tba.trainer.preflight.shape import meta_model

        loaders: dict[str, Callable[[Path], object]] = {
            "trainer": partial(load_model, device=torch.device("cpu")),
            "preflight": meta_model,
            "tokenizer": load_tokenizer,
            "end tokens": eos_ids,
            "digest": weights_digest,
        }
        return loaders[kind](model)

    return run


READ_A_MODEL: Commands = {
    **{kind: load(kind) for kind in ("trainer", "preflight", "tokenizer", "end tokens", "digest")},
    "generate": tba("generate", "2+2=", "--model", "RUN", "--cpu", *CPU),
    "doctor": tba("doctor", "--only", "settings", "--only", "model", *CPU, "--set", "model.path=RUN"),
    "run --dry-run": tba("run", "--dry-run", *CPU, "--set", "model.path=RUN"),
}

# ------------------------------------------------------------ run directories


def text(name: str, content: str) -> Callable[[Path], None]:
    return in_place(name, lambda path: path.write_text(content))


def checkpoint(**manifest: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        from tba.trainer.checkpoint import FORMAT

        fields = {"run": "", "step": 1, "reference": {}, "unreported": None, "adapter": None, "format": FORMAT}
        text("checkpoints/step_00000001/manifest.json", json.dumps(fields | manifest))(run)

    return change


def linked_snapshot(run: Path) -> None:
    """A directory of someone else with a manifest, under the name of an old snapshot."""
    other = run.parent / "others"
    other.mkdir()
    snapshot.write_manifest(other, snapshot.Manifest("r", 1, 1, 0.0, {}, snapshot.Canary([], [])))
    for version in (1, 2, 3):
        in_place(f"snapshots/v{version:08d}", lambda path: path.symlink_to(other))(run)


OWNER = {"run": "r", "run_name": "test", "sender": "s.1", "host": "h"}
DAMAGED = "checkpoints/step_00000001"
RUNS: dict[str, Callable[[Path], object]] = {
    "a FIFO in place of the launcher's lock": in_place("launcher.lock", os.mkfifo),
    "a device in place of the launcher's lock": in_place("launcher.lock", lambda path: path.symlink_to("/dev/zero")),
    "a launcher's lock that is a link to another file": in_place("launcher.lock", link_to_precious),
    "a launcher's lock with escapes": text("launcher.lock", "pid 1 on \x1b[2J\ncommand: \x1b]0;x\x07 rm -rf /\n"),
    "a FIFO in place of the evaluations": in_place("eval.jsonl", os.mkfifo),
    "a FIFO in place of the lock of the evaluations": in_place(".eval.jsonl.lock", os.mkfifo),
    "evaluations of other types": text(
        "eval.jsonl",
        '[]\n{"run": "test", "version": 1e400, "step": NaN, "prompts": -1, "intervals": 3, "accuracy": "x"}\n'
        + DEEP + "\n"
    ),
    "a FIFO in place of the metrics": in_place("metrics.jsonl", os.mkfifo),
    "a FIFO in place of a manifest": in_place("snapshots/v00000001/manifest.json", os.mkfifo),
    "a manifest nested 100,000 deep": text("snapshots/v00000001/manifest.json", DEEP),
    "a manifest that is a list": text("snapshots/v00000001/manifest.json", "[1]"),
    "snapshots that are links out of the run": linked_snapshot,
    "a checkpoint with a file of the system": checkpoint(files={"../../../../../../../../dev/zero": "0" * 64}),
    "a checkpoint whose files are a list": checkpoint(files=["a"]),
    "a checkpoint nested 100,000 deep": text("checkpoints/step_00000001/manifest.json", DEEP),
    "a FIFO in place of a checkpoint's manifest": in_place("checkpoints/step_00000001/manifest.json", os.mkfifo),
    "directories that are links in a circle": lambda run: [
        in_place(f"{name}/again", lambda path: path.symlink_to("..", target_is_directory=True))(run)
        for name in ("logs", "snapshots", "spool")
    ],
    "an owner of a spool nested 100,000 deep": text("spool/s.1/owner.json", DEEP),
    "a FIFO in place of a put": lambda run: (
        text("spool/s.1/owner.json", json.dumps(OWNER))(run), in_place("spool/s.1/0000000000000001.put", os.mkfifo)(run)
    ),
    "a spool that is a link to another directory": in_place("spool/s.1", lambda path: path.symlink_to("/etc")),
}  # fmt: skip


def resume(run: Path) -> None:
    """What a trainer and a searcher do with the files of a run before they connect."""
    from tba.common.weights.snapshot import collect
    from tba.searcher.delivery.spool import find_dead_spools, read_put
    from tba.trainer.checkpoint import newest

    with contextlib.suppress(TbaError):
        newest(run / "checkpoints")
    collect(run / "snapshots", keep_last=1, keep_every=0)
    for spool in find_dead_spools(run / "spool", "h"):
        for put in sorted(spool.directory.glob("*.put")):
            with contextlib.suppress(TbaError):
                read_put(put)
        spool.release()


def record(run: Path) -> None:
    """What `tba eval` does last."""
    from tba.common.evaluations import record_evaluations

    record_evaluations(run, [])


def launch(run: Path) -> None:
    """What `tba run --resume` does first."""
    from tba.deploy.run_directory import last_launch, sole_launcher

    last_launch(run)
    with sole_launcher(Config.model_validate({"run": {"dir": str(run)}})):
        pass


READ_A_RUN: Commands = {
    "runs": tba("runs", "RUN"),
    "status": tba("status", "--set", "run.dir=RUN"),
    "report, a picture": tba("report", "RUN", "--out", "RUN/../plot.png"),
    "report": tba("report", "RUN", "--out", "RUN/../report.html"),
    "ui": open_pages,
    "eval": tba("eval", *CPU, *FEW, "--set", "run.dir=RUN", "--set", f"model.path={EXAMPLE_MODEL}", "--cpu"),
    "export-model": tba("export-model", "RUN", "RUN/../exported"),
    "resume": resume,
    "launch": launch,
    "record": record,
}
KINDS = {
    "databases": (DATABASES, READ_A_DATABASE, filled_run),
    "models": (MODELS, READ_A_MODEL, lambda model: shutil.copytree(EXAMPLE_MODEL, model, dirs_exist_ok=True)),
    "runs": (RUNS, READ_A_RUN, filled_run),
}


# ------------------------------------------------------------ the program


def trouble_of(command: Callable[[Path], object], directory: Path) -> str:
    """Run a command. Returns "" if it ends in order or with an error sentence, else what it did."""

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        command(directory)
    except (TbaError, SystemExit):
        return ""
    except TooLong:
        return f"no end within {LIMIT_SECONDS} s"
    except BaseException as error:  # noqa: BLE001
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[-200:]} ({frame.filename}:{frame.lineno})"
    finally:
        signal.alarm(0)
    return ""


def contents(folder: Path) -> dict[str, str]:
    """What may not change in a folder: its entries, and the content of files outside the case's directory."""
    found = {}
    for path in sorted(folder.rglob("*")):
        own = path.relative_to(folder).parts[0] == "case"
        is_file = path.is_file() and not path.is_symlink()
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file and not own else ""
    return found


def main(kind: str, root: Path) -> Iterator[tuple[str, str, str]]:
    cases, commands, make = KINDS[kind]
    for number, (case, change) in enumerate(cases.items()):
        folder = root / str(number)
        directory = folder / "case"
        directory.mkdir(parents=True)
        (folder / "precious").write_text("of someone else")
        os.chdir(folder)
        make(directory)
        change(directory)
        before = contents(folder)
        for name, command in commands.items():
            yield case, name, trouble_of(command, directory)
            after = contents(folder)
            # SQLite's own files come and go with a connection, and a damaged checkpoint is set aside.
            gone = [
                path
                for path in before
                if after.get(path) != before[path] and not path.endswith(("-wal", "-shm")) and DAMAGED not in path
            ]
            yield case, name, f"deleted or changed: {gone}" if gone else ""
            if (folder / "ran").exists():
                yield case, name, "code of the directory has run"
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_directories_are_read_or_refused_with_a_sentence(tmp_path, kind):
    command = [sys.executable, "-m", "tba.tests.process.test_hostile_directories", kind, str(tmp_path)]
    # Standard input says "y" to each question.
    done = subprocess.run(
        command, input="y\n" * 99, env=clean_environment(), capture_output=True, text=True, timeout=580
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if line[2]] == []
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    cases, commands, _ = KINDS[kind]
    assert {(case, name) for case, name, _ in lines} == {(case, name) for case in cases for name in commands}


if __name__ == "__main__":
    for line in main(sys.argv[1], Path(sys.argv[2])):
        print(json.dumps(line), flush=True)
