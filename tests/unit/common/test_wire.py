"""The messages: their exact bytes, and an error for everything malformed."""

import hashlib
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from msgspec.structs import asdict

from tba.common.errors import VersionMismatch, WireError
from tba.common.wire import codec, fields, messages
from tba.common.wire.codec import (
    decode_plain_reply,
    decode_reply,
    decode_request,
    encode_plain_reply,
    encode_reply,
    encode_request,
    request_id_of,
)
from tba.common.wire.messages import GetStatus
from tba.common.wire.trajectory import (
    MAX_LOG_RATIO_BYTES,
    QUANTITIES,
    RowNumbers,
    Trajectory,
    kept_between,
    pack,
    sequences,
    unpack_arrays,
)
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.examples import FILE_MESSAGES, REPLIES, REQUESTS, STATE
from tba.tests.helpers.puts import make_episode, make_trajectory, put_message


def request(message: messages.Message, frames: list[bytes] | None = None) -> list[bytes]:
    return encode_request(message, id=3, role="searcher", sender="s.1", run="r", frames=frames or [])


def views(frames: list[bytes]) -> list[memoryview]:
    return [memoryview(frame) for frame in frames]


def repacked(frames: list[bytes], **changes: object) -> list[memoryview]:
    header = msgpack.unpackb(frames[0]) | changes
    return views([msgpack.packb(header), *frames[1:]])


def decode_put(columns, frames):
    """Decode a put with these columns, whatever they hold."""
    body = {"first_sequence": 0, "rows": columns}
    sent = repacked(request(messages.PutTrajectories(first_sequence=0, rows=None), frames), body=body)  # type: ignore[arg-type]
    return decode_request(sent).message


def decode_report(**numbers):
    """Decode a report with these columns of numbers, whatever they hold."""
    sent = request(REQUESTS["report_step"])
    body = msgpack.unpackb(sent[0])["body"]
    body["rows"] |= numbers
    return decode_request(repacked(sent, body=body)).message


IMPOSSIBLE_NUMBERS: list[tuple[dict[str, Any], str]] = [
    *(({"log_ratio": [value]}, "rows.log_ratio") for value in (math.nan, math.inf, -math.inf, "1", True, [1.0])),
    ({"weight": [1.0, 1.0]}, "the columns of numbers of rows differ in length"),
    ({"weight": [1.0] * (fields.MAX_ROWS + 1)}, "rows.weight"),
    ({"median": [1.0]}, "rows"),
    ({"token_log_ratios": [b"\0"]}, "log-ratios of tokens end within a number"),
    ({"token_log_ratios": [bytes.fromhex("007c")]}, "a log-ratio of a token is not finite"),
    ({"token_log_ratios": [bytes.fromhex("00fe")]}, "a log-ratio of a token is not finite"),
    ({"token_log_ratios": [bytes(MAX_LOG_RATIO_BYTES + 2)]}, "rows.token_log_ratios"),
    ({"token_log_ratios": [[0.5]]}, "rows.token_log_ratios"),
    ({"token_log_ratios": ["0.5"]}, "rows.token_log_ratios"),
]


@pytest.mark.parametrize(("numbers", "words"), IMPOSSIBLE_NUMBERS, ids=range(len(IMPOSSIBLE_NUMBERS)))
def test_numbers_of_rows_are_finite_or_null_and_have_one_length_and_a_limit(numbers, words):
    for good in (
        {"log_ratio": [None]},
        {"log_ratio": [-1e308]},
        {"token_log_ratios": [b""]},
        {"token_log_ratios": [None]},
    ):
        assert good.items() <= asdict(decode_report(**good).rows).items()
    with pytest.raises(WireError, match=words):
        decode_report(**numbers)


def test_log_ratios_of_tokens_have_a_limit_together_that_a_request_has_room_for():
    columns: dict[str, Any] = {**dict.fromkeys(QUANTITIES, [0.5] * 3), "skipped": [True] * 3}
    with pytest.raises(WireError, match=f"of {MAX_LOG_RATIO_BYTES + 2} bytes, at most {MAX_LOG_RATIO_BYTES} fit"):
        decode_report(**columns, token_log_ratios=[bytes(2), bytes(MAX_LOG_RATIO_BYTES // 2), bytes(5 << 20)])
    with pytest.raises(WireError, match="the columns of numbers of rows differ in length"):
        decode_report(**columns, token_log_ratios=[b""] * 2)
    rows, name = fields.MAX_ROWS, "x" * 195
    numbers: dict[str, Any] = dict.fromkeys(QUANTITIES, [0.5] * rows)
    most = messages.ReportStep(
        step=1 << 62,
        metrics={f"{name}{n:05}": 0.5 for n in range(1024)},
        reference="initial",
        trajectory_ids=[1 << 62] * rows,
        reference_logprobs=[0.5] * rows,
        rows=RowNumbers(**numbers, skipped=[True] * rows, token_log_ratios=[bytes(MAX_LOG_RATIO_BYTES // rows)] * rows),
    )
    assert decode_request(views(request(most))).message == most


def test_every_message_survives_the_wire():
    assert set(codec.REQUESTS) == set(REQUESTS) | {"put_trajectories"}
    assert set(codec.REPLIES) == set(REPLIES) | {"batch", "status"}
    assert set(codec.FILE_REQUESTS) | set(codec.FILE_REPLIES) == set(FILE_MESSAGES)
    for name, message in {**REQUESTS, "fetch_chunk": FILE_MESSAGES["fetch_chunk"]}.items():
        decoded = decode_request(views(request(message)), codec.REQUESTS | codec.FILE_REQUESTS)
        assert (decoded.header.type, decoded.header.id, decoded.header.sender) == (name, 3, "s.1")
        assert decoded.message == message
    for message in REPLIES.values():
        reply = decode_reply(views(encode_reply(message, id=3, run="r", state=STATE)))
        assert (reply.message, reply.header.state) == (message, STATE)
    for name, frames in (("chunk", [b"abc"]), ("failure", [])):
        plain = decode_plain_reply(views(encode_plain_reply(FILE_MESSAGES[name], id=3, run="r", frames=frames)))
        assert (plain.header.id, plain.message, [bytes(f) for f in plain.frames]) == (3, FILE_MESSAGES[name], frames)


def test_the_bytes_of_messages_are_those_of_protocol_version_3(trajectory):
    frames = encode_plain_reply(FILE_MESSAGES["chunk"], id=3, run="", frames=[b"abc"])
    assert [frame.hex() for frame in frames] == [
        "85a17603a474797065a56368756e6ba2696403a372756ea0a4626f647982"
        "a66f6666736574cf0000000200000000aa66696c655f6279746573cf0000000200000003",
        b"abc".hex(),
    ]
    header = {"role": "searcher", "sender": "s.1", "v": 3, "type": "lease_prompts", "id": 3, "run": "r"}
    body = {"want": 2, "held": [3], "weights_version": 7, "wait_seconds": 1.0}
    assert request(REQUESTS["lease_prompts"]) == [msgpack.packb(header | {"body": body})]
    assert request(REQUESTS["goodbye"])[0].hex() == (
        "87a4726f6c65a87365617263686572a673656e646572a3732e31a17603a474797065a7676f6f64627965"
        "a2696403a372756ea172a4626f647980"
    )
    sent = request(*put_message([trajectory(), trajectory(tokens=[9])]))
    assert hashlib.sha256(b"".join(sent)).hexdigest() == (
        "02384a659338786192005ba6ee143ef912af53e6bce7a54dd50cc7acb58612ac"
    )
    body = msgpack.unpackb(request(REQUESTS["report_step"])[0])["body"]
    assert msgpack.packb(body["rows"]).hex() == (
        "87a76c6f6770726f6291cbc004000000000000a96c6f675f726174696f91cb3fd0000000000000a9616476616e7461676591cbbfe0"
        "000000000000a677656967687491cb3ff0000000000000a86d69736d6174636891c0a7736b697070656491c2b0746f6b656e5f6c6f"
        "675f726174696f7391c404003800b4"
    )
    # A trainer that does not report them.
    del body["rows"]["token_log_ratios"]
    message = decode_request(repacked(request(REQUESTS["report_step"]), body=body)).message
    assert isinstance(message, messages.ReportStep)
    assert not_none(message.rows).token_log_ratios is None


@pytest.mark.parametrize("frames", [[], [b"a", b"b"]])
def test_a_chunk_has_exactly_one_frame_of_bytes(frames):
    with pytest.raises(WireError, match="one frame of bytes"):
        decode_plain_reply(views(encode_plain_reply(FILE_MESSAGES["chunk"], id=3, run="", frames=frames)))


def sent(*rows: Trajectory) -> tuple[messages.PutTrajectories, dict[str, list[Any]]]:
    """Return a put of rows as its receiver has it, and its arrays as lists."""
    decoded = decode_request(views(request(*put_message(rows))))
    assert isinstance(decoded.message, messages.PutTrajectories)
    arrays = unpack_arrays(asdict(decoded.message.rows), decoded.frames)
    return decoded.message, {kind: [one.tolist() for one in each] for kind, each in arrays.items()}


def test_a_put_says_only_that_it_does_not_close_its_visit(trajectory):
    bodies = []
    for closes in (True, False):
        encoded = request(*put_message([trajectory()], closes=closes))
        bodies.append(msgpack.unpackb(encoded[0])["body"])
        decoded = decode_request(views(encoded)).message
        assert isinstance(decoded, messages.PutTrajectories)
        assert decoded.closes == closes
    assert bodies[0].keys() == {"first_sequence", "rows"}
    assert bodies[1] == bodies[0] | {"closes": False}


def test_a_put_carries_one_frame_per_array_kind_and_kept_tokens_have_one_if_a_row_has_some(trajectory):
    _, arrays = sent(trajectory(tokens=[1, 2, 3]), trajectory(tokens=[9]))
    assert (arrays["response_ids"], arrays["version_runs"]) == ([[1, 2, 3], [9]], [[[0, 3]], [[0, 1]]])
    kept = np.array([3, 10, 0, 0, 2, 0], np.int32)
    rows = [trajectory(), trajectory(kept=kept), trajectory()]
    assert sent(*rows)[1]["kept"] == [[], kept.tolist(), []]
    assert kept_between(kept, 1, 3).tolist() == [0, 2, 0]
    assert len(put_message([trajectory()])[1]) == len(put_message(rows)[1]) - 1


def test_an_episode_survives_the_wire_and_other_rows_carry_nothing_for_it(trajectory):
    message, arrays = sent(make_episode(), trajectory(), trajectory(error="no", error_kind="worker"))
    turns, *others = not_none(message.rows.turns)
    assert [asdict(turn) for turn in turns] == [
        turn | {"messages": [("user", "on")], "environment_seconds": None} for turn in make_episode().turns
    ]
    assert (others, message.rows.error_kind) == ([[], []], [None, None, "worker"])
    assert arrays["segments"] == [[4, 9], [], []]
    columns, _ = pack([trajectory()] * 2)
    assert not {"turns", "error_kind"} & columns.keys()


TURN = make_episode().turns[0]


IMPOSSIBLE_EPISODES: list[tuple[dict[str, Any], str]] = [
    *(({"segments": np.array(at, np.int32)}, "segments") for at in ([0], [4, 4], [9, 4], [3], [4, 12], [-1], [4, 5])),
    ({"loss_mask": np.zeros(0, np.uint8)}, "segments"),
    ({"loss_mask": np.array([1, 1, 0, 1, *[0] * 8], np.uint8)}, "segments"),
    ({"turns": [TURN, TURN]}, "turn 1 of row 0 is not after the one before it"),
    ({"turns": [TURN | {"start": 10, "tokens": 3}]}, "turn 0 of row 0 .* inside the response"),
    ({"turns": [TURN | {"start": -1}]}, "start"),
    ({"turns": [TURN | {"tokens": 0}]}, "tokens"),
    ({"turns": [TURN | {"reward": math.nan}]}, "reward"),
    ({"turns": [TURN | {"parts": {"x": math.inf}}]}, "parts"),
    ({"turns": [TURN | {"messages": [["user", "x" * (fields.MAX_TURN_TEXT + 1)]]}]}, "messages"),
    ({"turns": [TURN | {"messages": [["user", "x"]] * (fields.MAX_TURN_MESSAGES + 1)}]}, "messages"),
    ({"turns": [TURN | {"note": 1}]}, "note"),
    ({"turns": [TURN] * (fields.MAX_TURNS + 1)}, "turns"),
    ({"error": "no", "error_kind": None}, "an error has a kind"),
    ({"error_kind": "reward"}, "an error has a kind"),
    ({"error": "no", "error_kind": "boredom"}, "error_kind"),
    *(({"stop_reason": reason}, "only a row with an error ends by") for reason in sorted(fields.ERROR_STOPS)),
]
IMPOSSIBLE_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"temperature": math.inf, "top_p": 1.0}}, "temperature"),
    ({"sampling": {"temperature": "hot", "top_p": 1.0}}, "temperature"),
    ({"sampling": {"temperature": 1.0, "top_p": 1.0, "min_p": 1.5}}, "min_p"),
    ({"reward": 1e308}, "reward"),
    ({"reward": math.nan}, "reward"),
    *(({"created_at": at}, "created_at") for at in (1e300, -1.0, math.nan)),
    ({"stop_reason": "boredom"}, "stop_reason"),
    # Arrays that no model can produce.
    ({"tokens": [-7]}, "negative token id"),
    ({"tokens": []}, "empty response_ids"),
    ({"prompt_ids": np.zeros(0, np.int32)}, "empty prompt_ids"),
    ({"tokens": [1], "logprobs": np.array([np.nan], np.float32)}, "not finite"),
    ({"logprobs": np.zeros(2, np.float32)}, "differ in length"),
    ({"version_runs": np.array([[0, 2]], np.int32)}, "version runs"),
    *(
        ({"kept": np.array(kept)}, "kept tokens")
        for kept in ([0, 0], [0] * 4, [0, 0, 0, 1], [2, 2, 0, 0, 0], [-1, 0, 0, 0])
    ),
]
IMPOSSIBLE = [
    *((make_episode, *one) for one in IMPOSSIBLE_EPISODES),
    *((make_trajectory, *one) for one in IMPOSSIBLE_ROWS),
]


@pytest.mark.parametrize(("make", "changes", "words"), IMPOSSIBLE)
def test_a_row_with_impossible_values_is_refused(make, changes, words):
    columns, frames = pack([make(**changes)])
    with pytest.raises(WireError, match=words):
        decode_put(columns, frames)


def test_the_sequences_of_an_episode_are_what_the_model_saw_and_share_its_sampled_tokens(trajectory):
    episode = make_episode()
    found = [(one.context_ids.tolist(), one.response_ids.tolist(), one.mask.tolist()) for one in sequences(episode)]
    assert found == [([1, 2], [5, 6, 9, 7], [1, 1, 0, 1]), ([1, 2, 9], [8, 3], [1, 1]), ([1, 6], [4], [1])]
    assert sum(float(one.logprobs.sum()) for one in sequences(episode)) == float(episode.logprobs.sum())
    (only,) = sequences(trajectory(tokens=[5, 6]))
    assert (only.context_ids.tolist(), only.response_ids.tolist(), only.mask.tolist()) == ([1, 2], [5, 6], [1, 1])
    (empty,) = sequences(trajectory(tokens=[], error="no"))
    assert (len(empty.context_ids), len(empty.response_ids)) == (2, 0)


STATUS, LEASE = request(GetStatus()), request(REQUESTS["lease_prompts"])


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (views([b"\xc1\xff\x00garbage"]), "not msgpack"),
        (views([msgpack.packb([1, 2])]), "header: Expected `object`"),
        ([], "empty"),
        (repacked(STATUS, type="frobnicate"), "frobnicate"),
        *((repacked(STATUS, body=body), "body: Expected `object`") for body in (None, list[int](), "lease_prompts")),
        (repacked(STATUS, body={"surprise": 1}), "surprise"),
        (views(request(GetStatus(), [b"1234"])), "carries no arrays"),
        (repacked(STATUS, v=99), "version 99"),
        *(
            (repacked(LEASE, body={"want": want, "held": [], "weights_version": 0, "wait_seconds": 0.0}), "want")
            for want in (-1, "two", 1.5, None, 1 << 40)
        ),
        # Of a snapshot server, which the buffer is not.
        (views(request(FILE_MESSAGES["fetch_chunk"])), "unknown message type 'fetch_chunk'"),
        # Deeply nested.
        (views([b"\x91" * 100_000]), None),
        *((views([b"\x81\xa1v" + b"\x91" * depth + b"\x01"]), None) for depth in (100, 900, 1000, 1020)),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(frames, words):
    with pytest.raises(VersionMismatch if words == "version 99" else WireError, match=words):
        decode_request(frames)


def test_frames_and_columns_that_do_not_add_up_are_refused(trajectory):
    message, frames = put_message([trajectory()])
    with pytest.raises(WireError, match="response_ids has 11 bytes"):
        decode_request(views(request(message, [frames[0], frames[1][:-1], *frames[2:]])))
    columns, frames = pack([trajectory(), trajectory()])
    with pytest.raises(WireError, match="column reward has 1 row,"):
        decode_put(columns | {"reward": [1.0]}, frames)


def test_the_id_of_a_malformed_request_is_found_if_it_has_one():
    assert request_id_of(repacked(request(GetStatus()), v=99)) == 3
    assert request_id_of(views([b"\xff"])) == 0


def test_a_trajectory_with_an_error_may_be_empty(trajectory):
    decode_request(views(request(*put_message([trajectory(tokens=[], error="it failed")]))))


def test_a_batch_too_large_to_send_and_prompts_beyond_the_size_of_the_task_are_refused():
    with pytest.raises(ValueError, match="at most 65536"):
        messages.SampleBatch(step=0, prompts=1000, samples=1000, reference="r", wait_seconds=0.0)
    with pytest.raises(ValueError, match="prompts 3 to 4 of a task of 4"):
        messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=4, offset=3, keys=["p3", "p4"])
