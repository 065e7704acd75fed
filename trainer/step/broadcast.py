"""A batch as bytes, for the ranks that have no connection to the buffer."""

import dataclasses
from typing import Any

import msgpack
import numpy as np
import torch

from tba.trainer.batch.batch import Row, TrainBatch


def pack_batch(batch: TrainBatch) -> bytes:
    """Encode a batch for `Ranks.send`, as msgpack. Reward parts are left out: only rank 0 records them."""
    fields = dataclasses.asdict(dataclasses.replace(batch, reward_parts=[]))
    packed: bytes = msgpack.packb(fields, default=_array_fields)
    return packed


def unpack_batch(packed: bytes) -> TrainBatch:
    """Decode a batch of `pack_batch`. It is equal bit for bit, except that it has no reward parts."""
    fields = _with_arrays(msgpack.unpackb(packed))
    rows = [Row(**_with_arrays(row)) for row in fields.pop("rows")]
    tensors = {name: torch.tensor(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
    return TrainBatch(**{**fields, **tensors, "rows": rows})


def _array_fields(array: Any) -> dict[str, Any]:
    values = np.asarray(array)
    return {"dtype": values.dtype.str, "shape": list(values.shape), "bytes": values.tobytes()}


def _with_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.frombuffer(value["bytes"], value["dtype"]).reshape(value["shape"])
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }
