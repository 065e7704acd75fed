"""Metrics: sinks with the real packages or that fail, every step once after a resume, and model FLOPs."""

import importlib.util
import json
import logging
import os
import resource
import sqlite3
import struct
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tba.common.config import Config
from tba.common.errors import MissingExtra
from tba.common.weights.pretrained import load_tokenizer
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.trainer import make_batch, make_row, tiny_model
from tba.trainer.metrics import metrics_log
from tba.trainer.metrics.flops import Throughput, peak_flops
from tba.trainer.metrics.metrics_log import (
    COLUMNS,
    Answer,
    BackgroundSink,
    MetricsLog,
    TensorBoardSink,
    TrackerSink,
    answer_rows,
    choose_answers,
    open_sinks,
)


class Failing:
    """A sink whose network is unreachable."""

    def record(self, step: int, time: float, numbers: dict[str, float], answers: object) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        pass


def refuse() -> Any:
    raise OSError("address in use")


@pytest.mark.parametrize(("open_sink", "lost"), [(Failing, 3), (refuse, 4)])
def test_a_sink_that_fails_or_cannot_be_opened_is_logged_once_and_loses_its_records(caplog, open_sink, lost):
    sink = BackgroundSink("remote", open_sink)
    for step in range(3):
        sink.record(step, 0.0, {"loss": 1.0})
    sink.close()
    assert sink.lost == lost
    assert sum("a metrics sink failed" in message for message in caplog.messages) == 1


def wandb_steps(directory) -> list[int]:
    """The steps in the files of all offline runs, in their order.

    Such a file is a LevelDB log: 7 bytes, then blocks of 32 KiB of records with headers (checksum, length, type).
    """
    from wandb.proto import wandb_internal_pb2

    steps = []
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, position, message = file.read_bytes(), 7, b""
        while position + 7 <= len(data):
            if 32768 - position % 32768 < 7:
                position += 32768 - position % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            message += data[position + 7 : position + 7 + length]
            position += 7 + length
            # A whole record, or the last piece of one.
            if kind in (1, 4):
                record = wandb_internal_pb2.Record.FromString(message)
                message = b""
                if record.WhichOneof("record_type") == "history":
                    steps.append(record.history.step.num)
    return steps


def answers_of(example_model, count: int) -> tuple[Any, list[Answer]]:
    """Return the tokenizer, and of two prompts with two answers each the `count` that are chosen."""
    tokenizer = load_tokenizer(example_model)
    rows = [
        make_row(slot, tokenizer.encode(prompt), tokenizer.encode(answer))
        for slot, (prompt, answer) in enumerate([("1+2=", "3"), ("1+2=", "4"), ("5+5=", "10"), ("5+5=", "1")])
    ]
    return tokenizer, choose_answers(make_batch(rows, [[1.0, 0.0], [1.0, 0.25]]), count)


@pytest.mark.parametrize(("count", "slots"), [(0, []), (1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_answers_are_spread_over_the_batch(example_model, count, slots):
    _, answers = answers_of(example_model, count)
    assert [one.trajectory for one in answers] == slots


def test_an_answer_is_a_row_with_its_texts_and_a_long_one_is_cut(example_model, monkeypatch):
    tokenizer, answers = answers_of(example_model, 4)
    assert answer_rows(tokenizer, answers)[3] == [3, "5+5=", "1", 0.25, 0]
    monkeypatch.setattr(metrics_log, "_MAX_CHARACTERS", 2)
    assert answer_rows(tokenizer, answers)[2][:3] == [2, "5+...", "10"]


@pytest.fixture(scope="module")
def trackio_directory(tmp_path_factory):
    """Where Trackio, which reads it when it is imported, keeps one database for each project."""
    directory = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(directory))
        pytest.importorskip("trackio")
        yield directory


def wait_for_another_second() -> None:
    """W&B names its folders by the second; a trainer takes longer than that to start again."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)


@pytest.mark.slow
def test_weights_and_biases_offline_has_one_run_over_two_starts_no_step_twice_and_a_table_of_answers(
    example_model, tmp_path, monkeypatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tokenizer, answers = answers_of(example_model, 2)
    for first, last in ((0, 3), (2, 5)):
        sink = TrackerSink("wandb", "project", tmp_path, "run", {"train": {"beta": 0.1}}, tokenizer)
        for step in range(first, last):
            sink.record(step, 1000.0 + step, {"loss": float(step)}, [] if step else answers)
        sink.close()
        wait_for_another_second()
    pattern = "wandb/offline-run-*/files/media/table/responses_0_*.table.json"
    # W&B's own process writes it.
    wait_until(lambda: any(tmp_path.glob(pattern)))
    (file,) = tmp_path.glob(pattern)
    table = json.loads(file.read_text())
    assert table["columns"] == COLUMNS
    assert table["data"] == [[0, "1+2=", "3", 1.0, 0], [2, "5+5=", "10", 1.0, 0]]
    names = {file.name for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    state = json.loads((tmp_path / "wandb.json").read_text())
    assert names == {f"run-{state['id']}.wandb"}
    wait_until(lambda: wandb_steps(tmp_path) == [0, 1, 2, 3, 4])


def test_trackio_has_one_run_over_two_starts_no_step_twice_and_a_table_of_answers(
    example_model, tmp_path, trackio_directory
):
    tokenizer, answers = answers_of(example_model, 2)
    for first, last in ((0, 3), (2, 5)):
        sink = TrackerSink("trackio", "project", tmp_path, "run", {"train": {"beta": 0.1}}, tokenizer)
        for step in range(first, last):
            sink.record(step, 1000.0 + step, {"loss": float(step)}, [] if step else answers)
        sink.close()
    with closing(sqlite3.connect(trackio_directory / "project.db")) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    state = json.loads((tmp_path / "trackio.json").read_text())
    assert {name for name, _, _ in rows} == {f"run-{state['id']}"}
    assert [step for _, step, _ in rows] == [0, 1, 2, 3, 4]
    table = json.loads(rows[0][2])["responses"]["_value"]
    assert table[1] == dict(zip(COLUMNS, [2, "5+5=", "10", 1.0, 0], strict=True))
    assert json.loads(rows[3][2]) == {"loss": 3.0, "wall_time": 1003.0}


def test_a_missing_package_of_a_sink_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path)}, "metrics": {"tensorboard": False, "wandb": "project"}}
    )
    with pytest.raises(MissingExtra, match=r"wandb is not installed: in the clone of tba, pip install '\.\[wandb\]'"):
        open_sinks(config)


def config(directory, **metrics) -> Config:
    return Config.model_validate({"run": {"dir": str(directory)}, "metrics": metrics})


def record(directory, first: int, last: int, value: float, clock: float = 1000.0) -> None:
    log = MetricsLog(directory, first_step=first, sinks=open_sinks(config(directory)))
    for step in range(first, last):
        log.record(step, clock + step, {"loss": value + step})
    log.sync()
    log.close()


def lines(directory) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_drops_the_steps_it_repeats_and_a_line_that_was_cut_off_by_a_crash(tmp_path):
    record(tmp_path, 0, 5, 0.0)
    record(tmp_path, 3, 7, 100.0)
    assert [line["loss"] for line in lines(tmp_path)] == [0, 1, 2, 103, 104, 105, 106]
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    record(tmp_path, 7, 8, 0.0)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5, 7]


def shown(directory, name: str = "loss") -> list[tuple[int, float]]:
    """The steps and values that TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory)).Reload()
    return [(event.step, event.value) for event in read.Scalars(name)] if name in read.Tags()["scalars"] else []


@pytest.mark.slow
@pytest.mark.parametrize("clock", [1000.0, 10.0])
def test_tensorboard_shows_the_repeated_steps_once_also_when_the_clock_has_gone_back(tmp_path, clock):
    record(tmp_path, 0, 5, 0.0)
    record(tmp_path, 3, 6, 100.0, clock)
    assert shown(tmp_path / "tensorboard") == [(0, 0), (1, 1), (2, 2), (3, 103), (4, 104), (5, 105)]


@pytest.fixture
def limit_files():
    """A function that limits the size of files in bytes: a write beyond it is cut off, the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
def test_tensorboard_goes_on_when_a_full_disk_has_space_again(tmp_path, limit_files, caplog):
    sink = BackgroundSink("tensorboard", partial(TensorBoardSink, tmp_path))

    def write(step: int, lost: int) -> None:
        sink.record(step, 1000.0, {"loss": step, "reward": -step})
        wait_until(lambda: sink.lost == lost if lost else len(shown(tmp_path)) == step + 1)

    write(0, lost=0)
    write(1, lost=0)
    (first,) = tmp_path.iterdir()
    whole = first.stat().st_size
    # The end of the file is torn, and the next file cannot be begun.
    limit_files(whole + 20)
    write(2, lost=1)
    limit_files(30)
    write(3, lost=2)
    assert first.stat().st_size == whole + 20
    assert [*tmp_path.iterdir()] == [first]
    limit_files(resource.RLIM_INFINITY)
    sink.record(4, 1000.0, {"loss": 4, "reward": -4})
    sink.record(5, 1000.0, {"loss": 5, "reward": -5})
    sink.close()
    assert shown(tmp_path) == [(0, 0), (1, 1), (4, 4), (5, 5)]
    assert shown(tmp_path, "reward") == [(0, 0), (1, -1), (4, -4), (5, -5)]
    assert sink.lost == 2
    assert [message for message in caplog.messages if "sink" in message] == [
        "a metrics sink failed; training continues, metrics.jsonl has all",
        "a metrics sink lost steps or did not end in time",
    ]


def test_a_line_is_added_while_the_disk_is_waited_for(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, first_step=0)
    log.record(0, 0.0, {})
    adding, to_disk = threading.Thread(target=log.record, args=[1, 0.0, {}]), os.fsync
    ended = []

    def slow(descriptor: int) -> None:
        adding.start()
        adding.join(timeout=60)
        ended.append(not adding.is_alive())
        to_disk(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    log.sync()
    adding.join()
    log.close()
    assert ended == [True]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


def test_dense_flops_equal_torchs_count_of_the_matrix_products():
    model = tiny_model(vocabulary=32, hidden=64)
    row = make_row(1, [1], np.arange(23) % 32)
    tokens = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    with FlopCounterMode(display=False) as counter:
        model.base_model(input_ids=tokens)
    products = counter.flop_counts["Global"]
    counted = 3 * (products[torch.ops.aten.mm] + 2 * model.lm_head.weight.numel() * len(row.response_ids))
    flops = Throughput(model)
    dense = flops.flops([row]) - 6 * 64 * row.tokens**2
    norms = 6 * row.tokens * sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert dense - norms == counted


def test_a_shared_prompt_counts_once_and_a_row_with_segments_costs_what_its_sequences_cost():
    flops = Throughput(tiny_model(vocabulary=32, hidden=64))
    prompt, rows = [1, 2, 3, 4], [[5, 6], [7], [8, 9, 10]]
    alone = [flops.flops([make_row(n, prompt, response)]) for n, response in enumerate(rows)]
    together = flops.flops([make_row(n, prompt, response) for n, response in enumerate(rows)])
    # make_row(_, prompt, []) is the prompt alone: no token is predicted.
    assert together == sum(alone) - 2 * flops.flops([make_row(0, prompt, [])])
    mask = np.array([1, 0, 0, 1, 1], np.uint8)
    row = make_row(1, [1, 2], [3, 4, 5, 6, 7], loss_mask=mask, segments=np.array([1], np.int32))
    assert flops.flops([row]) == flops.flops([make_row(1, [1, 2], [3])]) + flops.flops([make_row(2, [4, 5], [6, 7])])


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H200", 989.5), ("NVIDIA H20", 148), ("A100-SXM4-40GB", 312),
    ("NVIDIA A10", 125), ("NVIDIA A10G", 70), ("NVIDIA L4", 121), ("NVIDIA L40S", 362),
    ("NVIDIA B300 SXM6 AC", 2250), ("NVIDIA GB300", 2500), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 480),
    # A part of a card, older cards without bfloat16, and small ones whose names contain those of large ones.
    ("NVIDIA RTX A1000", None), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None), ("Tesla V100-SXM2-16GB", None),
    ("Quadro RTX 4000", None),
])  # fmt: skip
def test_a_gpu_has_the_peak_of_its_whole_name_an_unknown_one_is_named_and_a_cpu_has_none(
    monkeypatch, caplog, name, tflops
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    with caplog.at_level(logging.INFO, logger="tba"):
        assert peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)
    assert [record.fields for record in caplog.records] == ([] if tflops else [{"gpu": name}])
    assert peak_flops(torch.device("cpu")) is None
