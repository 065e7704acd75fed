"""Tensors of torch, seen as `tba.common.tensor_file` has them."""

import torch

from tba.common.tensor_file import Tensor

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
           torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
           torch.int64: "I64"}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def as_bits(tensor: torch.Tensor) -> Tensor:
    """A contiguous tensor of the host as its bits; shares its memory."""
    flat = tensor.reshape(-1)
    bits = flat.view(_BITS[flat.element_size()]).numpy().view(_UNSIGNED[flat.element_size()])
    return Tensor(_DTYPES[tensor.dtype], tuple(tensor.shape), bits)
