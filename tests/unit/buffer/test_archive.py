"""`tba buffer archive`: what moves, that it comes back bit for bit, and what a damaged archive says."""

import json
import os
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet
import pytest
from fsspec.implementations.local import LocalFileSystem

from tba.buffer.store.archives import ArchiveFile, Archives
from tba.buffer.tools import archive as tool
from tba.buffer.tools.archive import archive
from tba.buffer.tools.check import check
from tba.buffer.tools.show import describe
from tba.common import data_files
from tba.common.config import Config
from tba.common.errors import StorageError
from tba.tests.helpers.buffer import BufferThread, ask, change
from tba.tests.helpers.puts import log_ratios, make_episode, numbers_of

PAYLOADS = "SELECT y.*, COALESCE(kept, x'') FROM payloads y LEFT JOIN kept_tokens USING (trajectory) ORDER BY 1"
RATIOS = "SELECT trajectory, slot, token_log_ratios FROM consumption_rows ORDER BY trajectory"
CAP = ["--set", "run.name=test", "--set", "buffer.prompt_cap=2", "--keep-steps", 0]


@pytest.fixture
def capped(harness, trajectory):
    """Ten trajectories of one prompt, of which two can be sampled; step 0 was trained on the first two."""
    buffer = harness(buffer={"prompt_cap": 2}, fill=(1, 0))
    odd = np.array([-0.0, np.float32(-1e-40), -3.4e38, *[-0.1] * 1997], np.float32)
    buffer.put([trajectory(tokens=[0] * 2000, logprobs=odd), trajectory(tokens=[1] * 2000)], 0)
    buffer.sample(0, prompts=1, samples=2)
    buffer.report(0, rows=numbers_of(2, token_log_ratios=log_ratios([0.5] * 2000, [-6e-8] * 2000)))
    cut = trajectory(text="2 + 2", tokens=[7], kept=np.array([3, 0]))
    more = [make_episode("p0"), cut, trajectory(error="no", tokens=[])]
    buffer.put([*more, *(trajectory(tokens=[n] * 2000) for n in range(5))], 2)
    buffer.store.close()
    return buffer.store.path


@pytest.fixture
def move(tba_buffer, capped):
    """Runs the command with a destination."""

    def run(to: object, *options: object):
        return tba_buffer("archive", to, "-b", capped, *CAP, *options)

    return run


def read_all(path: Path) -> list[tuple[object, ...]]:
    """The payloads of the trajectories of a database, read from their archives."""
    places = ask(path, "SELECT id, archive FROM trajectories WHERE archive IS NOT NULL ORDER BY id")
    return [(id_, *Archives().read(id_, url).payload) for id_, url in places]


def test_tokens_that_cannot_be_sampled_move_and_come_back_bit_for_bit(move, capped, tmp_path, monkeypatch):
    before, ratios = ask(capped, PAYLOADS), ask(capped, RATIOS)
    shown = [describe(capped, id_, None)["log_ratios"] for id_ in (1, 2, 3)]
    done = move("old", "--json").json
    assert (done["moved"], len(done["files"])) == (8, 1)
    assert done["file_bytes_after"] < done["file_bytes_before"]
    assert ask(capped, "SELECT trajectory FROM payloads") == [(9,), (10,)]
    assert read_all(capped) == before[:8]
    read = ArchiveFile(done["files"][0]).read(0)
    assert [(id_, slot, blob) for id_ in (1, 2) for (_, slot), blob in read[id_].log_ratios.items()] == ratios
    assert {blob for *_, blob in ask(capped, RATIOS)} == {None}
    assert [describe(capped, id_, None)["log_ratios"] for id_ in (1, 2, 3)] == shown
    assert sorted(own[0][0] for own in shown[:2]) == [-(2.0**-24), 0.5]
    assert {finding["result"] for finding in check(capped)} == {"ok"}
    assert ask(capped, "SELECT * FROM kept_tokens") == []
    assert [path.name[:12] for path in (tmp_path / "old").glob("*/*")] == ["000000000001"]
    # Files that were moved are read once the database knows where.
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(StorageError, match="is not there"):
        read_all(capped)
    change(capped, "UPDATE archives SET url = replace(url, '/old/', '/new/')")
    assert read_all(capped) == before[:8]
    monkeypatch.setattr("tba.buffer.store.archives._MOST_NUMBERS", 10)
    with pytest.raises(StorageError, match="has more in one part than tba writes"):
        read_all(capped)


class Shelf(LocalFileSystem):  # type: ignore[misc]
    """Another place than this machine's disks, as far as tba can tell."""

    protocol = "shelf"


def test_an_archive_elsewhere_needs_to_be_named_to_be_written_and_to_be_read(move, capped, tmp_path, monkeypatch):
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    before, destination = ask(capped, PAYLOADS), f"shelf://{tmp_path}/old"
    refused = move(destination)
    assert (refused.exit_code, f"TBA_ARCHIVES={destination} in" in refused.message) == (2, True)
    monkeypatch.setenv("TBA_ARCHIVES", f"s3://bucket {destination}")
    assert move(destination).exit_code == 0
    assert read_all(capped) == before[:8]
    monkeypatch.delenv("TBA_ARCHIVES")
    with pytest.raises(StorageError, match=r"is not on this machine: TBA_ARCHIVES="):
        read_all(capped)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("reference://{name}::file://{path}/refs.json", "is no file of `tba buffer archive`"),
        ("simplecache::http://127.0.0.1:9/{name}", "is no file of `tba buffer archive`"),
        ("file://{path}/../{name}", "is no file of `tba buffer archive`"),
        ("http://127.0.0.1:9/{name}", "is not on this machine"),
        ("jupyter://x/{name}", "is not on this machine"),
        ("file://{path}/{name}", "not a regular file"),
    ],
)
def test_a_database_opens_only_files_that_tba_named_and_no_fifo(url, sentence, tmp_path):
    name = "000000000001-0123abcd.parquet"
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match=sentence):
        ArchiveFile(url.format(name=name, path=tmp_path))


def test_several_files_and_groups_hold_everything_once_but_what_a_resumed_trainer_may_ask_for(
    move, capped, monkeypatch
):
    monkeypatch.setattr(tool, "_FILE_GROUPS", 2)
    monkeypatch.setattr(tool, "_GROUP_BYTES", 10_000)
    before = ask(capped, PAYLOADS)
    assert move("old", "--keep-steps", 1, "--json").json["moved"] == 6
    assert [row[0] for row in ask(capped, PAYLOADS)] == [1, 2, 9, 10]
    (url,) = move("old", "--json").json["files"]
    files = [url for (url,) in ask(capped, "SELECT url FROM archives")]
    assert (len(files), url in files) == (3, True)
    assert sum(len(ArchiveFile(url).groups) for url in files) > 3
    assert read_all(capped) == before[:8]
    assert move("old", "--json").json["moved"] == 0


def test_show_export_and_import_read_the_archive(move, capped, tba_buffer, tmp_path):
    named = ("-b", capped)
    tba_buffer("export", "before.jsonl", *named)
    shown = tba_buffer("show", 3, *named, "--json").json
    (url,) = move("old", "--json").json["files"]
    tba_buffer("export", "after.jsonl", *named)
    assert (tmp_path / "after.jsonl").read_text() == (tmp_path / "before.jsonl").read_text()
    assert tba_buffer("show", 3, *named, "--json").json | dict.fromkeys(("archive", "compacted_at")) == shown
    assert "sum of log-probabilities" in tba_buffer("show", 3, *named).output
    # The files alone are enough for a new run.
    done = tba_buffer("import", url.removeprefix("file://"), "-b", "new.sqlite", "--json").json
    assert (done["new"], ask(tmp_path / "new.sqlite", PAYLOADS)[2][1:]) == (8, read_all(capped)[2][1:])
    text = "SELECT text, turns FROM trajectory_rows WHERE id IN (3, 4)"
    assert [json.loads(turns) for _, turns in ask(tmp_path / "new.sqlite", text)] == [make_episode().turns, []]


def test_a_running_server_drops_what_left_its_sampling(harness, trajectory, tmp_path):
    buffer = harness(tmp_path / "run/buffer.sqlite", buffer={"prompt_cap": 2}, fill=(1, 5))
    buffer.store.close()
    before = ask(buffer.store.path, PAYLOADS)
    config = {
        "buffer": {"prompt_cap": 2, "database": buffer.store.path},
        "run": {"name": "test", "dir": tmp_path / "run"},
    }
    server = BufferThread(Config.model_validate(config))
    config["buffer"]["address"] = server.address
    try:
        done = archive(Config.model_validate(config), str(tmp_path / "old"), keep_steps=0, on_progress=print)
    finally:
        server.stop()
    assert done["moved"] == 3
    assert ask(buffer.store.path, PAYLOADS) == before[3:]
    assert read_all(buffer.store.path) == before[:3]


def test_a_file_without_a_record_is_used_by_the_next_command(move, capped, monkeypatch):
    before = ask(capped, PAYLOADS)

    def cut_off(*_: object, **__: object) -> None:
        raise RuntimeError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(tool, "_as_read", lambda _: None)
        assert "has other tokens than the database: nothing of it was dropped" in move("elsewhere").message
        assert ask(capped, PAYLOADS) == before
        patched.setattr(tool._Mover, "_adopt", cut_off)
        with pytest.raises(RuntimeError, match="cut off"):
            move("old")
    assert ask(capped, PAYLOADS) == before
    (there,) = Path("old").glob("*/*.parquet")
    (Path("old") / there.parent.name / ".x.parquet.1.tmp").write_text("half a file")
    assert move("old", "--json").json["files"] == [there.absolute().as_uri()]
    assert [*Path("old").rglob("*.*")] == [there]
    assert read_all(capped) == before[:8]


def test_a_file_of_another_copy_of_the_database_does_not_replace_other_tokens(move, capped):
    backup = capped.read_bytes()
    move("old")
    capped.write_bytes(backup)
    # What came after the backup has ids that the lost database had used.
    change(capped, "UPDATE payloads SET logprobs = zeroblob(8000) WHERE trajectory = 1")
    before = ask(capped, PAYLOADS)
    done = move("old", "--json").json
    assert (done["moved"], len(done["files"])) == (8, 2)
    assert read_all(capped) == before[:8]


def damaged(file: Path) -> None:
    """Change a byte of the tokens of the first trajectories."""
    with pyarrow.parquet.ParquetFile(file) as opened:
        group = opened.metadata.row_group(0)
    column = next(one for n in range(group.num_columns) if "response_ids" in (one := group.column(n)).path_in_schema)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + 20] ^= 1
    file.write_bytes(data)


HARMS = {
    Path.unlink: "is not there",
    damaged: "cannot be read",
    lambda file: file.write_bytes(file.read_bytes()[:-9]): "cannot be read",
    lambda file: file.write_bytes(max(file.parent.iterdir()).read_bytes()): "is another file",
}


@pytest.mark.parametrize(("harm", "sentence"), HARMS.items(), ids=["removed", "damaged", "cut", "swapped"])
def test_a_file_that_cannot_be_read_is_named_everywhere(move, capped, tba_buffer, monkeypatch, harm, sentence):
    monkeypatch.setattr(tool, "_FILE_GROUPS", 1)
    monkeypatch.setattr(tool, "_GROUP_BYTES", 10_000)
    url = move("old", "--json").json["files"][0]
    harm(Path(url.removeprefix("file://")))
    named = f"the archive {url} {sentence}"
    assert named in tba_buffer("show", 1, "-b", capped).output.replace("\n", " ")
    assert named in describe(capped, 1, None)["no_tokens"]
    refused = tba_buffer("export", "rows.jsonl", "-b", capped)
    assert (refused.exit_code, named in refused.message, Path("rows.jsonl").exists()) == (1, True, False)
    if harm is not damaged:
        failed = [finding["detail"] for finding in check(capped) if finding["result"] == "fail"]
        assert [named in detail for detail in failed] == [True]


DESTINATIONS = {
    "nope://x": "Protocol not known",
    "/proc/nowhere": "the archive /proc/nowhere",
    "memory://bucket/old": "ends with this command",
}


def test_a_destination_that_cannot_be_written_is_named_and_nothing_is_lost(move, capped):
    for destination, sentence in DESTINATIONS.items():
        refused = move(destination)
        assert refused.exit_code in (1, 2)
        assert sentence in refused.message
    assert len(ask(capped, PAYLOADS)) == 10


def test_an_archive_in_s3_is_written_read_and_damaged_there(move, capped, tba_buffer, monkeypatch):
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    settings = {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("TBA_ARCHIVES", "s3://bucket")
    before = ask(capped, PAYLOADS)
    try:
        (url,) = move("s3://bucket/old", "--json").json["files"]
        assert read_all(capped) == before[:8]
        assert {finding["result"] for finding in check(capped)} == {"ok"}
        system, path = data_files.file_system(url)
        system.rm(path)
        assert f"the archive {url} is not there" in tba_buffer("export", "rows.jsonl", "-b", capped).message
    finally:
        server.stop()
    shown = tba_buffer("show", 1, "-b", capped).output.replace("\n", " ")
    assert f"the archive {url} " in shown


def test_duckdb_and_pandas_read_the_files(move, capped, tmp_path):
    """As docs/storage.md has it."""
    duckdb, pandas = pytest.importorskip("duckdb"), pytest.importorskip("pandas")
    move("old")
    query = """SELECT id, reward, turns[1].reward, list_sum(logprobs), len(response_ids)
               FROM 'old/*/*.parquet' WHERE len(turns) > 0"""
    assert duckdb.sql(query).fetchall() == [(3, 0.75, 0.25, -3.0, 12)]
    rows = pandas.read_parquet("old").set_index("id")
    assert rows.loc[4, "text"] == "2 + 2"
    assert rows.loc[3, "response_ids"].tolist() == make_episode().response_ids.tolist()
    assert rows.loc[1, "logprobs"].tobytes() == read_all(capped)[0][3]
