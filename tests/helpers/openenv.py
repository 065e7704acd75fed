"""The levels that OpenEnv's own validator gives to a trace, from the package as it is published.

Only the modules of its capture are loaded, not the package around them, which needs a hundred others. They are there if
`openenv` 0.10 is installed without its dependencies, or its unpacked wheel is on PYTHONPATH:

    pip download openenv==0.10.0 --no-deps && unzip openenv-*.whl -d openenv
    PYTHONPATH=openenv python -m pytest tests/unit/buffer/test_training_trace.py
"""

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

_PACKAGES = ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture")
Levels = set[tuple[str, str]]


def is_there() -> bool:
    """Whether the package can be found."""
    return find_spec("openenv") is not None


def validate(trace: dict[str, Any]) -> Levels:
    """Return (level, check) of what the validator finds: in the calls, in their graph, and in the sequences of it.

    A trace that its schema refuses without a named check has ("FATAL", "schema").
    """
    training, checks, graphs = (module(name) for name in ("training", "capture.validate", "capture.graph"))
    try:
        calls = training.TrainingTrace.model_validate(trace).turns
    except ValidationError as error:
        return {("FATAL", name) for name in re.findall(r"\[FATAL\] (\w+)", str(error))} or {("FATAL", "schema")}
    graph, report, masks = graphs.RolloutGraph(), checks.Report(), {}
    for call in calls:
        ids = call.prompt_token_ids, call.completion_token_ids, call.per_token_logps
        reason = call.response["choices"][0]["finish_reason"] if call.response else None
        report.merge(checks.check_turn(*ids, finish_reason=reason))
        graph.add_turn(graphs.TurnNode(call.node_id, *ids))
        masks[call.node_id] = call.loss_mask[len(call.prompt_token_ids) :]
    report.merge(checks.check_rollout(graph))
    sequences = [_sequence(graph, checks, masks, leaf) for leaf in graph.leaves()]
    # One path of the graph suffices for the rollout to be trained on.
    if sequences and not any(one.ok for one in sequences):
        report.merge(sequences[0])
    return {(one.level, one.code) for one in report.findings if one.level != "INFO"}


def _sequence(graph: Any, checks: Any, masks: dict[str, list[int]], leaf: Any) -> Any:
    """Check the path to a leaf with the masks of the trace, as a trainer gets it."""
    sequence, start = graph.sequence_for(leaf.node_id), 0
    for node in graph.path_to(leaf.node_id):
        start = len(node.prompt_ids)
        sequence.loss_mask[start : start + len(node.sampled_ids)] = masks[node.node_id]
    sequence.logprobs = [p if counts else 0.0 for p, counts in zip(sequence.logprobs, sequence.loss_mask, strict=True)]
    return checks.check_sequence(sequence)


def module(name: str) -> ModuleType:
    spec = find_spec("openenv") if "openenv" not in sys.modules else sys.modules["openenv"].__spec__
    assert spec is not None
    assert spec.origin is not None
    for package in _PACKAGES:
        if package not in sys.modules:
            module = sys.modules[package] = ModuleType(package)
            module.__path__ = [str(Path(spec.origin).parent.joinpath(*package.split(".")[1:]))]
            module.__spec__ = spec
    return importlib.import_module(f"openenv.core.harness.{name}")
