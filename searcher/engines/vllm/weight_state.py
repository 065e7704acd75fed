"""What a model computes with: its parameters and buffers, and the tensors that were made from them after loading.

A layer may keep a tensor derived from its weights: an absorbed matrix of MLA, packed experts, a converted scale. A copy
into the weights alone would leave it stale. `ProcessingWatch` finds such tensors wherever they are kept, so that the
self-test at the start of an engine can clear them together with the weights, and see which way of loading restores
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# Bytes that are hashed at a time: on a GPU as much is copied to the host.
_CHUNK = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor made from the weight `name`, held weakly."""

    name: str
    storage: StorageWeakRef
    on_host: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Derived":
        """Hold a tensor's storage."""
        reference: StorageWeakRef = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(name, reference, tensor.device.type == "cpu")

    @property
    def tensor(self) -> Tensor | None:
        """All its bytes, uint8; None if it is gone."""
        # Any: torch's annotation omits None.
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ProcessingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the weights of a model through all operations while it is active, and what is made from them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By the identity of the storage, which a weak reference keeps from being used again.
        self._known = {_key(one): Derived.of(name, one) for name, one in weights(model)}

    def derived(self, model: nn.Module) -> list[Derived]:
        """What was made, is in use, and is no parameter. It may be a buffer: vLLM reloads only those of the files."""
        parameters = {_key(one) for _, one in weights(model)}
        return [one for key, one in self._known.items() if key not in parameters and one.tensor is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        source = next((one for one in map(self._find, tree_leaves((args, kwargs))) if one is not None), None)
        if source is not None:
            # A higher-order operator has no schema.
            schema = getattr(func, "_schema", None)
            written = [
                args[number] if number < len(args) else kwargs.get(one.name)
                for number, one in enumerate(schema.arguments if schema else ())
                if one.alias_info is not None and one.alias_info.is_write
            ]
            for made in tree_leaves((result, written)):
                if _has_storage(made):
                    self._known.setdefault(_key(made), Derived.of(source.name, made))
        return result

    def _find(self, value: Any) -> Derived | None:
        return self._known.get(_key(value)) if _has_storage(value) else None


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters with elements by name; those that keep their bytes in inner tensors as these."""
    for name, parameter in model.named_parameters():
        yield from _parts(name, parameter.detach())


def fingerprint(model: nn.Module, derived: Sequence[Derived]) -> dict[str, str]:
    """Address, layout and hash of each parameter and buffer, and the hash of each tensor made from them.

    A derived tensor on the host that is out of use has "". On a GPU that is a difference: CUDA graphs may read it.
    """
    buffers = (_parts(name, buffer) for name, buffer in model.named_buffers())
    prints = {
        name: f"{one.data_ptr():x} {one.dtype} {tuple(one.shape)} {one.stride()} {_hash(one)}"
        for name, one in chain(weights(model), *buffers)
    }
    for number, one in enumerate(derived):
        gone = "" if one.on_host else "gone"
        prints[f"tensor {number}, made from {one.name}"] = gone if (tensor := one.tensor) is None else _hash(tensor)
    return prints


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if after.get(name) not in ("", before.get(name)))


def clear(derived: Sequence[Derived]) -> None:
    for one in derived:
        if (tensor := one.tensor) is not None:
            tensor.zero_()


def zeros(model: nn.Module) -> set[str]:
    """Names of the parameters whose elements are all zero."""
    return {name for name, one in weights(model) if not _bytes(one).any()}


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor that has bytes of its own, or its inner tensors, as of torchao."""
    # Any: torch types such a subclass as an intersection that mypy holds to be impossible.
    outer: Any = tensor
    if is_traceable_wrapper_subclass(outer):
        for attribute in outer.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{attribute}", getattr(outer, attribute))
    elif tensor.numel():
        yield name, tensor


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _hash(tensor: Tensor) -> str:
    state = xxhash.xxh3_128()
    flat = _bytes(tensor)
    for start in range(0, len(flat), _CHUNK):
        state.update(flat[start : start + _CHUNK].cpu().numpy().data)
    return state.hexdigest()
