"""One publication, from the trainer's weights to the engine's: seconds by stage.

    MILLIONS=512 python -m benchmarks.publication

A random Llama on the CPU with float32 weights, published as bfloat16, and the searcher's half with the real swap into
the parameters of a second model, without vLLM around them. All of it is on the critical path: nothing overlaps but the
hash, in a thread during the canary. The unit is a memcpy of the published bytes, measured in each round: by wall clock,
and by the CPU time of the thread on the critical path, which other work on the machine changes less.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Seconds, print_table, timed
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.run_snapshots import weights_directory
from tba.common.weights.node_store import clear
from tba.common.weights.snapshot import Snapshot
from tba.common.weights.tensor_file import blake3_of_bytes
from tba.searcher.engines.vllm.weight_swap import MappedFiles, WeightSwap, record
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.publishing.canary import use_one_core
from tba.trainer.publishing.snapshot_writer import Publication, SnapshotWriter, Written
from tba.trainer.step.build import prepare

MILLIONS = int(os.environ.get("MILLIONS", "512"))
ROUNDS = 5
# Parts of a stage, measured on their own afterwards.
ALONE = ("alone: the canary", "alone: the hash")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        torch.manual_seed(0)
        path = Publisher(Path(folder), random_model())
        path.round(0)
        memcpy = memcpy_of(path.bytes)
        rounds = [
            {name: np.divide(seconds, memcpy()) for name, seconds in path.round(step).items()}
            for step in range(1, ROUNDS + 1)
        ]
        path.close()
    for one in rounds:
        one["step to served"] = np.sum([found for name, found in one.items() if name not in ALONE], axis=0)
    rows = [
        [name, *(f"{median:.2f}" for median in np.median([one[name] for one in rounds], axis=0))] for name in rounds[0]
    ]
    title = f"a publication of {path.bytes / 2e6:.0f} M bfloat16 weights, in memcpys of their bytes, median of {ROUNDS}"
    print_table(title, ["stage", "wall clock", "CPU time"], rows)


class Publisher:
    """Both halves of a publication of a model in one process. `weights` is where snapshots are, by default in memory.

    `written` is the newest snapshot, and `engine` has the parameters that a searcher would serve.
    """

    def __init__(self, folder: Path, model: Any, weights: Path | None = None) -> None:
        AutoTokenizer.from_pretrained("examples/arithmetic/model").save_pretrained(folder / "model")
        model.config.save_pretrained(folder / "model")
        sections: dict[str, Any] = {
            "run": {"dir": str(folder / "run"), "name": "bench"},
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
            "train": {"min_free_mib": 0, "steps": 10**9, "snapshots_in": "memory"},
            "search": {"weights_dir": str(weights)} if weights else {},
        }
        self._config = Config.model_validate(sections)
        self._config.snapshots.mkdir(parents=True)
        copies = HostBuffers(model.device)
        prepare(self._config, str(model.device))
        # The publisher's thread.
        self._publisher = ThreadPoolExecutor(1, initializer=use_one_core, initargs=(model.device,))
        self._writer = SnapshotWriter(self._config, model, copies, unwrapped=model, model_files=folder / "model")
        self._model = model
        self._node = SnapshotAssembler(weights_directory(self._config), "auto", SystemClock())
        self._served: Any = None
        self._swap: WeightSwap | None = None
        self.written: Written | None = None
        self.engine: dict[str, torch.Tensor] = {}
        self.pinned = False
        self.bytes = 2 * sum(parameter.numel() for parameter in model.parameters())

    def round(self, step: int) -> dict[str, Seconds]:
        """Publish and serve once. Returns seconds by stage, by wall-clock and by CPU time."""
        with torch.no_grad():
            next(self._model.parameters()).add_(0.01)
        stages: dict[str, Seconds] = {}
        cuda = self._model.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        copy = noted(stages, "trainer: copy and round", self._writer.copy)
        if cuda:
            # The training thread goes on meanwhile.
            noted(stages, "trainer: the copy arrives", copy.wait)
            self.pinned = next(iter(copy.wait().values())).is_pinned()
        publication = Publication(step, step, copy)
        write = partial(self._writer.write, publication)
        written = self._in_publisher(stages, "trainer: canary, hash, seal", write)
        self._in_publisher(stages, ALONE[0], partial(self._writer.make_canary, copy.wait()))
        self._in_publisher(stages, ALONE[1], partial(blake3_of_bytes, copy.file.content.data))
        self._writer.announced(written)
        self.written = written
        find = partial(self._node.assemble, written.announcement("").weights)
        snapshot, pinned = noted(stages, "node: find or link, verify", find)
        files = [*map(str, snapshot.weight_files)]
        swap = self._swap or self._start(snapshot)
        noted(stages, "node: map", partial(swap.prepare, files, step))
        noted(stages, "node: exchange", swap.exchange)
        if self._served is not None:
            self._served.release()
        self._served = pinned
        return stages

    def _in_publisher(self, stages: dict[str, Seconds], name: str, call: Callable[[], Any]) -> Any:
        """Measure a stage in the publisher's thread."""
        return self._publisher.submit(noted, stages, name, call).result()

    def close(self) -> None:
        """Delete the files."""
        if self._served is not None:
            self._served.release()
        self._publisher.shutdown()
        self._writer.close(finished=True)
        # They are in memory, also after this process.
        clear(weights_directory(self._config))

    def _start(self, snapshot: Snapshot) -> WeightSwap:
        """An engine's parameters, and how the files go into them."""
        files = MappedFiles(pin=False).open([*map(str, snapshot.weight_files)])
        self.engine = {
            name: nn.Parameter(tensor.to(self._model.device, copy=True), False) for name, tensor in files.items()
        }
        engine = nn.ParameterDict({name.replace(".", "/"): one for name, one in self.engine.items()})
        parameters = dict(engine.named_parameters())

        def load(weights: Any) -> None:
            for name, tensor in weights:
                self.engine[name].copy_(tensor)

        slices = record(load, parameters, files, set())
        layouts = {name: (one.shape, one.dtype) for name, one in parameters.items()}
        self._swap = WeightSwap(engine, slices, layouts)
        return self._swap


def random_model() -> LlamaForCausalLM:
    """A Llama with float32 weights, about MILLIONS of parameters."""
    layers = max(1, round((MILLIONS - 65) / 28))
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=12,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def noted(stages: dict[str, Seconds], name: str, call: Callable[[], Any]) -> Any:
    """Note the seconds of a call under `name`, with the CPU time of this thread, and return its result."""
    stages[name], result = timed(call, time.thread_time)
    return result


def memcpy_of(size: int) -> Callable[[], Seconds]:
    """Return a function that copies that number of bytes within memory, and returns the seconds."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def memcpy() -> Seconds:
        found = [timed(partial(target.copy_, source), time.thread_time)[0] for _ in range(3)]
        return Seconds(*(statistics.median(one) for one in zip(*found, strict=True)))

    return memcpy


if __name__ == "__main__":
    main()
