"""Several buffers instead of one: do batches that are drawn from each in proportion equal those drawn from one?

    python -m benchmarks.shards runs/demo/buffer.sqlite [--default-rules] [--shards 2 4 8] [--seeds 20]

The arrivals of a recorded run are replayed: before each of its batches, the trajectories that it had then enter the
sampling index, and a batch of the same size is drawn by the sampler with the rules of that run. With shards there is an
index and a sampler for each, and a prompt belongs to the shard of its hash, so that the responses to a prompt stay
together. The groups of a batch are divided among the shards as a draw without replacement from all eligible prompts
would divide them. The differences from one index are paired by seed.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from benchmarks.harness import print_table
from tba.buffer.sampling.index import Block, SamplingIndex
from tba.buffer.sampling.sampler import NEVER, Sampler, Shortage
from tba.buffer.store.reader import open_reader
from tba.common.config.buffer import BufferSection

_ROWS = """
SELECT t.id, p.key, COALESCE(s.step, 0), t.reward, t.dedup_hash, t.payload_bytes, t.prompt FROM trajectory_rows t
JOIN prompts p ON p.id = t.prompt LEFT JOIN snapshots s ON s.run = t.run AND s.version = t.policy_version
WHERE t.error IS NULL ORDER BY t.id
"""
_BATCHES = "SELECT step, prompts, samples, newest_trajectory FROM batches ORDER BY step"
_CONFIG = "SELECT config FROM starts ORDER BY id DESC LIMIT 1"


class Drawn(NamedTuple):
    """A replay: means over all drawn rows, how often a drawn trajectory was drawn, and the share that never was."""

    reward: float
    staleness: float
    uses: float
    unused: float


class Recorded:
    """The arrivals and batches of a run, and its rules."""

    def __init__(self, path: Path, *, default_rules: bool) -> None:
        with open_reader(path) as connection:
            self.rows = connection.execute(_ROWS).fetchall()
            self.batches = connection.execute(_BATCHES).fetchall()
            config = json.loads(connection.execute(_CONFIG).fetchone()[0])
        self.rules = BufferSection() if default_rules else BufferSection.model_validate(config["buffer"])
        self.publish_every = config["train"]["publish_every"]

    def replay(self, shards: int, seed: int) -> Drawn:
        """Draw every batch from this many shards."""
        rng, arrived = np.random.default_rng(seed), 0
        settings = {"publish_every": self.publish_every, "samples": self.batches[0][2]}
        samplers = [Sampler(SamplingIndex(self.rules), self.rules, **settings) for _ in range(shards)]
        rewards, ages, uses = [], [], Counter[int]()
        for step, groups, samples, newest in self.batches:
            while arrived < len(self.rows) and self.rows[arrived][0] <= newest:
                self._add(samplers, self.rows[arrived])
                arrived += 1
            for sampler, count in zip(samplers, self._parts(samplers, step, groups, samples, rng), strict=True):
                if not count:
                    continue
                draw = sampler.sample(step=step, groups=count, samples=samples, rng=rng)
                assert not isinstance(draw, Shortage), draw
                entries = [entry for group in draw.groups for entry in group]
                sampler.index.mark_trained(entry.id for entry in entries)
                rewards += [entry.reward for entry in entries]
                ages += [step - entry.step for entry in entries]
                uses.update(entry.id for entry in entries)
        return Drawn(
            statistics.mean(rewards), statistics.mean(ages), statistics.mean(uses.values()), 1 - len(uses) / arrived
        )

    def _add(self, samplers: list[Sampler], row: tuple[int, str, int, float, int, int, int]) -> None:
        id_, key, step, reward, dedup_hash, size, prompt = row
        index = samplers[xxhash.xxh3_64_intdigest(key.encode()) % len(samplers)].index
        index.extend(Block(prompt, [id_], [step], [reward], [dedup_hash], [False], [size]))

    def _parts(
        self, samplers: list[Sampler], step: int, groups: int, samples: int, rng: np.random.Generator
    ) -> list[int]:
        """Return how many groups of a batch each shard gives."""
        if len(samplers) == 1:
            return [groups]
        limit = self.rules.max_staleness
        oldest = NEVER if limit == "unbounded" else step - limit
        tables = [sampler._table(sampler.need(samples)) for sampler in samplers]
        eligible = [int(np.count_nonzero(table.with_entries_since(oldest))) for table in tables]
        return list(rng.multivariate_hypergeometric(eligible, groups).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="sampling from several buffers")
    parser.add_argument("database", type=Path)
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--default-rules", action="store_true", help="sample by the defaults of [buffer]")
    options = parser.parse_args()
    recorded = Recorded(options.database, default_rules=options.default_rules)
    one = [recorded.replay(1, seed) for seed in range(options.seeds)]
    rows = [["one", *(f"{statistics.mean(column):.4f}" for column in zip(*one, strict=True))]]
    for shards in options.shards:
        several = [recorded.replay(shards, seed) for seed in range(options.seeds)]
        pairs = zip(zip(*one, strict=True), zip(*several, strict=True), strict=True)
        differences = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]
        cells = [f"{statistics.mean(d):+.4f} ± {statistics.stdev(d) / options.seeds**0.5:.4f}" for d in differences]
        rows.append([f"{shards} shards", *cells])
    title = f"{len(recorded.rows)} trajectories, {len(recorded.batches)} batches; differences from one index"
    print_table(title, ["", "reward", "staleness", "uses", "never used"], rows)


if __name__ == "__main__":
    main()
