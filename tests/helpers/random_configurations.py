"""Random configurations of the buffer and of both sides of it, and a run of one on a real buffer without engines."""

import random
from typing import Any

from tba.common.config import Config
from tba.common.wire import messages
from tba.tests.helpers.puts import make_trajectory

STEPS = 3
# Of the longest wait that needs no explanation, and a little more.
_ROUNDS = 80


def draw_sections(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Return sections of small sizes, in which limits are often as large as a batch or a visit."""
    unbounded = "unbounded"
    buffer = {
        "max_trajectories": rng.choice([unbounded, unbounded, *range(1, 60, 4)]),
        "max_payload_bytes": rng.choice([unbounded, unbounded, 100, 700, 2000, 9000]),
        "keep": rng.choice(["newest", "newest", "reservoir", "both"]),
        "prompt_cap": rng.choice([100, 1, 2, 4, 8]),
        "prompt_keep": rng.choice(["newest", "best", "reservoir"]),
        "min_fill": rng.choice([0, 0, 5, 16, 50]),
        "dedup": rng.random() < 0.7,
        "replacement": rng.choice(["if_needed", "never", "always"]),
        "max_staleness": rng.choice([unbounded, unbounded, 0, 1, 4]),
        "samples_per_insert": rng.choice([unbounded, unbounded, 0.5, 1, 4]),
        "flat_group_weight": rng.choice([1.0, 0.0, 0.3]),
        "varied_fraction": rng.choice([1.0, 1.0, 0.3]),
        "prompt_priority": rng.choice(["uniform", "recency", "softmax", "rank"]),
    }
    search = {"samples_per_prompt": rng.choice([1, 2, 4, 9]), "temperature": rng.choice([1.0, 1.0, 0])}
    train = {
        "prompts_per_step": rng.choice([1, 2, 4, 7]),
        "samples_per_prompt": rng.choice([2, 4]),
        "publish_every": rng.choice([1, 1, 2]),
    }
    objective = {"name": rng.choice(["tb", "online_dpo"])}
    return {"buffer": buffer, "search": search, "train": train, "objective": objective}


def run_until_it_waits(buffer: Any, config: Config, prompts: int, rng: random.Random) -> str:
    """Train `STEPS` steps, a round a second. Returns "", or the stall of a run that made no step for over a minute."""
    buffer.register(prompts)
    buffer.announce(0, 0)
    version = step = sequence = waited = 0
    train, samples = config.train, config.search.samples_per_prompt
    while step < STEPS:
        for role, sender in (("trainer", "t.1"), ("searcher", "s.1")):
            busy = messages.Heartbeat(activity="generating", reason="", weights_version=version, metrics={})
            buffer.ask(busy, role=role, sender=sender)
        leases = buffer.lease(4, version=version)
        for visit in leases.visits if leases else ():
            greedy = config.search.is_greedy
            tokens = [[version] if greedy else [rng.randrange(9), rng.randrange(9)] for _ in range(samples)]
            group = [make_trajectory(visit.prompt_key, visit.lease, version, tokens=one) for one in tokens]
            buffer.put(group, sequence)
            sequence += samples
        if buffer.sample(step, train.prompts_per_step, train.samples_per_prompt) is None:
            waited += 1
            stall = buffer.service.status().stall
            if waited == _ROUNDS or (stall is not None and stall.reason == "no_growth"):
                return f"{stall.reason}: {stall.sentence}" if stall is not None else "no cause was found"
        else:
            buffer.report(step)
            step, waited = step + 1, 0
            if step % train.publish_every == 0:
                version += 1
                buffer.announce(version, step)
        buffer.clock.advance(1.0)
    return ""
