"""Snapshots of adapters: the base once and in full, then only the adapters, each on that base and on no other.

base      the model that training started from, rounded to the published dtype: the policy of step 0
adapter   A and B of each layer, in PEFT's format: `tba.common.weights.adapter`
"""

from collections.abc import Callable
from pathlib import Path

import torch

from tba.common.errors import ConfigError
from tba.common.weights import adapter
from tba.common.weights.adapter import Adapter, Factors
from tba.common.weights.snapshot import Manifest, describe_files
from tba.trainer.model.adapters import BASE, FACTORS, A, B, gathered
from tba.trainer.model.host_buffers import HostCopy, Tensors
from tba.trainer.publishing.snapshot_writer import Publication, SnapshotWriter, Written, bytes_of


class AdapterWriter(SnapshotWriter):
    """Publishes the adapters of `model`. The host keeps a copy of the base."""

    _base_copy: HostCopy | None = None
    _base: Written | None = None
    # Whether a base is published, or comes with a snapshot in the queue. Used by the training thread alone.
    _base_comes = False
    _names_checked = False

    @property
    def gathers(self) -> tuple[str, ...]:
        """The base is copied to the host once: it never changes."""
        return (FACTORS,) if self._base_copy else (BASE, FACTORS)

    def copy(self, before: Callable[[], None]) -> HostCopy:
        """Copy the adapters, and the first time the base as well."""
        before()
        if self._base_copy is None:
            self._base_copy = self._copies.copy(gathered(self._model, BASE), self._dtype)
        return self._copies.copy(gathered(self._model, FACTORS), torch.float32)

    def needs_base(self, step: int) -> bool:
        """Whether a base must be published before this snapshot.

        This is so for the first one after a restart, and after the base was deleted by hand. Step 0 is the base itself,
        and nothing is based on the last snapshot.
        """
        if self._is_last(step):
            return False
        if self._base is not None and not self._base.exists:
            self._base_comes = False
        needed = step > 0 and not self._base_comes
        self._base_comes = True
        return needed

    def protected_paths(self) -> tuple[Path, ...]:
        """The base, also while all snapshots that are kept are full ones."""
        return (self._base.path,) if self._base else ()

    def _bytes_needed(self, publication: Publication) -> int:
        """The adapters, and all weights for each full snapshot that `write` will add: base, policy or both."""
        full = int(self._base_first(publication)) + int(self._must_be_full(publication))
        return bytes_of(publication.copy) + full * bytes_of(self._copied_base())

    def write(self, publication: Publication) -> Written:
        """Publish the adapters, or all weights with them merged."""
        if publication.step == 0 and not self._has_base():
            # Every B is zero.
            written = self._write_base(publication.version)
        else:
            if self._base_first(publication):
                assert publication.base_version is not None
                self._write_base(publication.base_version, only_base=True)
            written = self._write_policy(publication)
        self._copies.release(publication.copy)
        return written

    def _base_first(self, publication: Publication) -> bool:
        wanted = publication.base_version is not None and not self._is_last(publication.step)
        return wanted and not self._has_base()

    def _must_be_full(self, publication: Publication) -> bool:
        """Also if the base was deleted after this publication was queued: the next one brings a new base."""
        no_base = not (self._has_base() or self._base_first(publication))
        return no_base or self._config.train.keeps_snapshot(publication.step)

    def _write_base(self, version: int, *, only_base: bool = False) -> Written:
        weights = self._copied_base().wait()
        canary, saved = self._make_canary(weights), self._as_saved(weights)
        self._base = self._publish(
            version,
            lambda directory: self._write_full(directory, version, 0, canary, saved, only_base=only_base),
        )
        return self._base

    def _write_policy(self, publication: Publication) -> Written:
        policy, merged = self._policy(publication)
        version, step = publication.version, publication.step

        def build(directory: Path) -> Manifest:
            if self._must_be_full(publication) or self._base is None:
                # Rounded before the canary, which must hold for the weights in the files.
                rounded = {name: tensor.to(self._dtype) for name, tensor in merged.items()}
                canary = self._make_canary(rounded)
                return self._write_full(directory, version, step, canary, self._as_saved(rounded))
            canary = self._make_canary(merged)
            adapter.save(directory, policy, rank=self._config.lora.rank, base=self._base.path)
            return self._based_on(self._base, publication, canary, describe_files(directory))

        return self._publish(version, build)

    def _policy(self, publication: Publication) -> tuple[Adapter, Tensors]:
        """Return the adapter of a publication, and the base with the adapter merged in, in float32."""
        weights = self._copied_base().wait()
        policy = _adapter_of(publication.copy.wait(), self._config.lora.alpha / self._config.lora.rank)
        if not self._names_checked:
            _check_names(list(policy.factors), weights, self._as_saved(weights))
            self._names_checked = True
        changed = {name: weights[name].float() + torch.from_numpy(policy.change(name)) for name in policy.factors}
        return policy, {**weights, **changed}

    def _copied_base(self) -> HostCopy:
        assert self._base_copy is not None, "copied with the first adapters"
        return self._base_copy

    def _has_base(self) -> bool:
        return self._base is not None and self._base.exists


def _adapter_of(copied: Tensors, scaling: float) -> Adapter:
    names = [name.removeprefix(f"{A}/") for name in copied if name.startswith(f"{A}/")]
    return Adapter(
        {name: Factors(copied[f"{A}/{name}"].numpy(), copied[f"{B}/{name}"].numpy()) for name in names}, scaling
    )


def _check_names(names: list[str], weights: Tensors, saved: Tensors) -> None:
    """Raise ConfigError for a weight that the model's files store under another name or in another shape.

    Engines find the layers of an adapter by the names in the files.
    """
    for name in names:
        if name not in saved or saved[name].shape != weights[name].shape:
            raise ConfigError(
                f'lora.publish = "adapter" cannot publish an adapter of {name}, which the files of the model store in '
                'another form: set lora.publish = "merged", or lora.targets without it'
            )
