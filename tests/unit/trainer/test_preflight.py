"""The memory estimate against sums made by hand, against what autograd saves, and against what FSDP2 gathers."""

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tba.cli.checks import Plan
from tba.cli.checks import examine as all_checks
from tba.common.config import Config
from tba.common.errors import ConfigError, UsageError
from tba.common.system.devices import Gpu, assumed_gpus
from tba.common.weights.pretrained import refuse_quantized
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.ranks import make_learner
from tba.tests.helpers.trainer import make_row, random_batch, save_tiny_model
from tba.trainer.batch.micro_batches import GPU_PASS_TOKENS, forward_passes, micro_batches
from tba.trainer.checkpoint import tensors_of
from tba.trainer.distributed import ALONE
from tba.trainer.metrics.flops import Throughput
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.model.scorer import Scorer
from tba.trainer.preflight import before_start
from tba.trainer.preflight.before_start import check_memory, trainer_memory
from tba.trainer.preflight.check import (
    Report,
    Setup,
    device_bytes,
    examine,
    host_bytes,
    layer_activation_bytes,
    state_bytes,
)
from tba.trainer.preflight.shape import ModelShape, shape_of, with_reference
from tba.trainer.step.build import require_memory
from tba.trainer.step.host_optimizer import HostAdamW

H100 = 85_000_000_000
GIB = 1 << 30
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads")  # fmt: skip


def sized(kind: Any, *sizes: int, **more: int) -> Any:
    """Return the configuration of a model with these _SIZES."""
    return kind(**dict(zip(_SIZES, sizes, strict=True)), **more)


EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
CONFIGS: dict[str, Any] = {
    "Qwen2.5-7B": sized(Qwen2Config, 152064, 3584, 18944, 28, 28, 4),
    "Qwen3-8B": sized(Qwen3Config, 151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "Qwen3-30B-A3B": sized(Qwen3MoeConfig, 151936, 2048, 6144, 48, 32, 4, head_dim=128, **EXPERTS),
    "rho-1b": sized(LlamaConfig, 32000, 2048, 5632, 22, 32, 4),
}
# By hand. A layer: q, k, v and o (with the biases of Qwen2's q, k, v; the norms of Qwen3's heads), the MLP or router
# and 128 experts, two norms. The root: embeddings, head, last norm.
LAYERS = {
    "Qwen2.5-7B": 2 * 3584 * 3584 + 2 * 3584 * 512 + (3584 + 512 + 512) + 3 * 3584 * 18944 + 2 * 3584,
    "Qwen3-8B": 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096,
    "Qwen3-30B-A3B": 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 128 * 2048 + 128 * 3 * 2048 * 768 + 2 * 2048,
    "rho-1b": 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048,
}
ROOTS = {
    "Qwen2.5-7B": 2 * 152064 * 3584 + 3584,
    "Qwen3-8B": 2 * 151936 * 4096 + 4096,
    "Qwen3-30B-A3B": 2 * 151936 * 2048 + 2048,
    "rho-1b": 2 * 32000 * 2048 + 2048,
}
PARAMETERS = {
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "rho-1b": 1_100_048_384,
}
FULL = Setup(1, half=True, reference="frozen", lora_rank=0, offload=False, gathered=False, checkpointing=True,
             tokens=16384)  # fmt: skip


@cache
def meta(name: str) -> Any:
    config = CONFIGS[name]
    config.tie_word_embeddings = False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@cache
def shape(name: str) -> ModelShape:
    return shape_of(meta(name))


def memory_found(config: Config, node: Any = None) -> tuple[str, str]:
    """(result, detail) of `tba doctor`, for the GPUs of this machine or of another node."""
    (row,) = all_checks(Plan(config, node), ["trainer memory"])
    return row.result, row.detail


def report(
    name: str,
    ranks: int = 1,
    *,
    total: int | None = H100,
    lora: int = 0,
    host: int = 2048 * GIB,
    supervised: bool = False,
    nodes: int = 1,
    **train: Any,
) -> Report:
    sections = {"model": {"path": "m"}, "task": {"train": "t"}, "train": train, "lora": {"rank": lora}}
    config = Config.model_validate(sections)
    return examine(
        config, shape(name), ranks=ranks, nodes=nodes, gpu_total=total, host_total=host, supervised=supervised
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_layers_and_root_are_those_counted_by_hand(name):
    found = shape(name)
    assert (found.largest_layer, found.root) == (LAYERS[name], ROOTS[name])
    assert found.parameters == PARAMETERS[name] == found.layers * LAYERS[name] + ROOTS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_states_by_hand(name):
    n = PARAMETERS[name]
    # float32 weights and gradients, two moments, a reference in bfloat16.
    states = {"weights": 4 * n, "gradients": 4 * n, "optimizer": 8 * n, "reference": 2 * n}
    assert state_bytes(shape(name), FULL) == states
    assert sum(state_bytes(shape(name), replace(FULL, ranks=4)).values()) == pytest.approx(18 * n / 4, abs=4)
    # bfloat16 weights and reference; masters, gradients and moments are on the host.
    offloaded = state_bytes(shape(name), replace(FULL, offload=True))
    assert offloaded == {"weights": 2 * n, "gradients": 0, "optimizer": 0, "reference": 2 * n}
    adapters = 16 * shape(name).adapter
    # The base in bfloat16 is its own reference. Adapters: weights, gradients and moments in float32.
    assert sum(state_bytes(shape(name), replace(FULL, lora_rank=16, reference="")).values()) == 2 * n + 16 * adapters


def test_adapters_by_hand():
    # Inputs and outputs of q, k, v, o, gate, up and down in each layer; of Qwen3-30B-A3B's attention alone.
    heads = (3584 + 3584) + 2 * (3584 + 512) + (3584 + 3584)
    assert shape("Qwen2.5-7B").adapter == 28 * (heads + 3 * (3584 + 18944))
    assert shape("Qwen3-30B-A3B").adapter == 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert shape_of(meta("Qwen2.5-7B"), ["q_proj"]).adapter == 28 * 2 * 3584


def test_everything_on_one_gpu_by_hand_for_7_b_with_offload():
    n, layer, root, head = PARAMETERS["Qwen2.5-7B"], LAYERS["Qwen2.5-7B"], ROOTS["Qwen2.5-7B"], 152064 * 3584
    # Per token and layer: two norms (input and normalised, float32), five bfloat16 inputs of linear layers, q, k, v and
    # attention's output, four tensors of the MLP.
    saved = 2 * 8 * 3584 + 5 * 2 * 3584 + 2 * (3584 + 512 + 512 + 3584) + 4 * 2 * 18944
    # Checkpointed inputs of layers, one layer, its backward pass, the last hidden states.
    activations = 16384 * (28 * 4 * 3584 + saved + (3 * 2 * 18944 + 8 * 3584) + 20 * 3584)
    # A chunk of 2^27 logits in bfloat16 and float32, with exponentials; the head's gradient, and what is added to it.
    logits = (1 << 27) * (2 + 4 + 4) + head * (4 + 2)
    found = device_bytes(shape("Qwen2.5-7B"), replace(FULL, offload=True))
    assert found == {
        "states": 4 * n,
        "gathered weights and gradients": 2 * (root + 2 * layer),
        "activations": activations,
        "logits": logits,
    }
    assert sum(found.values()) / 1e9 == pytest.approx(52.5, abs=0.1)


def test_two_sharded_gpus_by_hand_for_7_b():
    n, layer, root = PARAMETERS["Qwen2.5-7B"], LAYERS["Qwen2.5-7B"], ROOTS["Qwen2.5-7B"]
    found = device_bytes(shape("Qwen2.5-7B"), replace(FULL, ranks=2))
    assert found["states"] == 18 * n // 2
    # Gathered in bfloat16, its gradient in bfloat16, the input of the reduction in float32: root and two layers.
    assert found["gathered weights and gradients"] == (2 + 2 + 4) * (root + 2 * layer)
    kept = device_bytes(shape("Qwen2.5-7B"), replace(FULL, ranks=2, gathered=True))
    assert kept["gathered weights and gradients"] == (2 + 4) * n + 4 * root


def test_a_larger_teacher_of_a_small_policy_by_hand(tmp_path):
    CONFIGS["Qwen3-8B"].save_pretrained(tmp_path)
    n, r = PARAMETERS["rho-1b"], PARAMETERS["Qwen3-8B"]
    both = with_reference(shape("rho-1b"), tmp_path)
    # Adapters send hardly a gradient, so the teacher's root and two layers, in bfloat16, are the most that is gathered.
    found = device_bytes(both, replace(FULL, ranks=2, lora_rank=8))["gathered weights and gradients"]
    assert found == 2 * (ROOTS["Qwen3-8B"] + 2 * LAYERS["Qwen3-8B"])
    # The policy's masters wait on the host while the teacher is loaded in float32.
    assert host_bytes(both, replace(FULL, offload=True))["loading"] == 4 * (n + r)
    assert host_bytes(both, FULL)["loading"] == 4 * r


def test_the_host_by_hand_for_7_b_with_offload():
    n = PARAMETERS["Qwen2.5-7B"]
    found = host_bytes(shape("Qwen2.5-7B"), replace(FULL, offload=True))
    # Masters, gradients, two moments, pinned copies in bfloat16.
    assert found["offloaded optimizer"] == (16 + 2) * n
    # Rank 0 has moved or sharded the policy when it loads the reference, but keeps its masters until then.
    assert found["loading"] == 2 * 4 * n
    assert found["checkpoint"] == 12 * n
    assert host_bytes(shape("Qwen2.5-7B"), replace(FULL, ranks=8))["loading"] == 4 * n
    assert host_bytes(shape("Qwen2.5-7B"), replace(FULL, ranks=8, offload=True))["loading"] == 2 * 4 * n


def test_a_node_with_a_whole_model_has_the_states_of_its_own_gpus_and_the_whole_optimizer_on_its_host():
    n, two = PARAMETERS["Qwen2.5-7B"], replace(FULL, ranks=16, nodes=2)
    states = [sum(state_bytes(shape("Qwen2.5-7B"), replace(two, replicas=one)).values()) for one in (1, 2)]
    assert states == pytest.approx([18 * n / 16, 18 * n / 8], abs=8)
    hosts = [host_bytes(shape("Qwen2.5-7B"), replace(two, offload=True, replicas=one)) for one in (1, 2)]
    assert [host["offloaded optimizer"] for host in hosts] == [18 * n // 2, 18 * n]


@pytest.mark.parametrize(("ranks", "tokens", "replicas", "gathered"), [
    # 17 GB of states, 50 gathered, 5 of logits; the activations of 16,384 tokens are 14 more.
    (16, 4096, 2, True),
    (16, 16384, 2, False),
    # States of two GPUs are 69 GB, of four 34.
    (4, 16384, 1, False),
])  # fmt: skip
def test_on_two_nodes_auto_is_what_communicates_least_of_what_fits(ranks, tokens, replicas, gathered):
    keys: dict[str, Any] = {"gradient_checkpointing": True, "micro_batch_tokens": tokens}
    found = report("Qwen2.5-7B", ranks, nodes=2, **keys)
    assert (found.setup.replicas, found.setup.gathered, found.fits) == (replicas, gathered, True)
    node = report("Qwen2.5-7B", ranks, nodes=2, sharding="node", **keys)
    assert (node.setup.replicas, node.fits) == (2, replicas == 2)
    assert f"on each of {ranks} GPUs, {ranks // 2} for each whole model" in node.sentence()
    assert report("Qwen2.5-7B", ranks, nodes=2, sharding="all", **keys).setup.replicas == 1


@pytest.mark.parametrize("offload", [False, True])
def test_the_hosts_estimate_is_what_optimizer_and_checkpoint_allocate(offload):
    learner = make_learner(double=False, autocast=True, offload="optimizer" if offload else "none")
    learner.step(random_batch(1))
    found = host_bytes(shape_of(learner.policy), replace(FULL, offload=offload))
    states = learner.optimizer.state_dict()["state"].values()
    copies = HostBuffers(torch.device("cpu")).copy(tensors_of(learner)).tensors
    # Random states and AdamW's step counts are not weights.
    small = sum(one.nbytes for name, one in copies.items() if name.endswith("step") or "/rng." in name)
    assert sum(one.nbytes for one in copies.values()) - small == found["checkpoint"]
    if isinstance(learner.optimizer, HostAdamW):
        moments = [one for state in states for name, one in state.items() if name != "step"]
        buffers = [*learner.optimizer.masters, *learner.optimizer._gradients, *learner.optimizer._staged, *moments]
        assert sum(one.nbytes for one in buffers) == found["offloaded optimizer"]


def test_a_host_without_room_for_snapshots_is_told_what_is_enough():
    # Offload takes 18 bytes per parameter and a checkpoint 12; snapshots 8 more.
    needed, peak = (round(PARAMETERS["Qwen2.5-7B"] * size / 1e9, 1) for size in (30, 38))
    small = report("Qwen2.5-7B", host=int(needed * 1e9) + GIB, offload="optimizer", gradient_checkpointing=True)
    assert small.fits
    assert f"{peak} GB of" in small.sentence()
    assert f"{needed} GB are enough" in small.sentence()
    large = report("Qwen2.5-7B", host=int(peak * 1e9) + GIB, offload="optimizer", gradient_checkpointing=True)
    assert "enough" not in large.sentence()


def test_experts_that_the_files_hold_one_by_one_go_through_two_more_copies_on_the_host():
    n = PARAMETERS["Qwen3-30B-A3B"]
    assert host_bytes(shape("Qwen3-30B-A3B"), FULL)["snapshots"] == (4 + 2) * 2 * n
    assert host_bytes(shape("Qwen3-8B"), FULL)["snapshots"] == 4 * 2 * PARAMETERS["Qwen3-8B"]


# GB per GPU, and whether an H100 of 80 GB is enough (80.3 GB are usable): worked out as above.
TABLE = [
    ("Qwen2.5-7B", 1, {}, 280.2, False),
    ("Qwen2.5-7B", 1, {"offload": "optimizer", "gradient_checkpointing": True}, 52.5, True),
    ("Qwen2.5-7B", 2, {"gradient_checkpointing": True}, 100.0, False),
    ("Qwen2.5-7B", 3, {"gradient_checkpointing": True}, 77.1, True),
    ("Qwen3-8B", 1, {"offload": "optimizer", "gradient_checkpointing": True}, 58.0, True),
    ("Qwen3-8B", 3, {"gradient_checkpointing": True}, 84.2, False),
    ("Qwen3-8B", 4, {"gradient_checkpointing": True}, 71.9, True),
    ("Qwen3-30B-A3B", 1, {"offload": "optimizer", "gradient_checkpointing": True}, 141.6, False),
    ("Qwen3-30B-A3B", 3, {"offload": "optimizer", "gradient_checkpointing": True}, 71.4, True),
    ("rho-1b", 1, {"gradient_checkpointing": True}, 29.9, True),
    ("rho-1b", 1, {}, 64.0, True),
]


@pytest.mark.parametrize(("name", "ranks", "train", "expected", "fits"), TABLE)
def test_the_table_of_the_documentation(name, ranks, train, expected, fits):
    found = report(name, ranks, sharding="all", **train)
    assert sum(found.device.values()) / 1e9 == pytest.approx(expected, abs=0.05)
    assert found.fits == fits


def saved_bytes(model: Any, tokens: int) -> int:
    """Return the bytes that autograd saves of a row under autocast, without weights: as the trainer packs rows."""
    found: dict[tuple[int, int], int] = {}
    kept = []
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    half = {p.shape for p in model.parameters()} | {p.T.shape for p in model.parameters() if p.dim() == 2}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Autocast's copies of weights, counted elsewhere, have their shapes.
        if storage.data_ptr() not in weights and tensor.shape not in half:
            found[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.arange(tokens)[None] % model.config.vocab_size
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with saving, torch.autocast("cpu", torch.bfloat16):
        model.base_model(input_ids=ids, use_cache=False)
    return sum(found.values())


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "rho-1b"])
def test_activations_of_a_layer_are_what_autograd_saves(name):
    small = dict(zip(_SIZES, (64, 256, 704, 0, 8, 2), strict=True)) | {"head_dim": 32, "layer_types": None}
    settings = CONFIGS[name].to_dict() | small
    tokens, totals = 97, []
    for layers in (1, 3):
        config = type(CONFIGS[name])(**settings | {"num_hidden_layers": layers})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        totals.append(saved_bytes(model, tokens))
    measured = (totals[1] - totals[0]) / 2 / tokens
    estimated = layer_activation_bytes(shape_of(model), replace(FULL, checkpointing=False))
    assert measured <= estimated * 1.02
    assert estimated == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("limit", [4096, 16384, 65536])
def test_the_padding_of_padded_passes_on_a_gpu_is_within_the_estimate(limit):
    setup = report("rho-1b", packing="padded", micro_batch_tokens=limit, prompts_per_step=64).setup
    assert report("rho-1b", micro_batch_tokens=limit).setup.padding == 0 < setup.padding
    split, largest = partial(forward_passes, overhead=GPU_PASS_TOKENS), 0
    for seed, mean in itertools.product(range(4), (100, 400, 1500)):
        lengths = (150 + np.random.default_rng(seed).geometric(1 / mean, 256)).tolist()
        for part in micro_batches([[n] for n in lengths], 8, limit=limit, split=split, rank=0, ranks=1):
            for chunk in part.chunks:
                rows = [lengths[row] for row in part.rows][chunk.rows]
                padded = sum(len(one) * max(rows[n] for n in one) for one in chunk.passes)
                largest = max(largest, padded - sum(rows))
    assert setup.padding / 3 < largest <= setup.padding


FSDP = """
import os, sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from tba.trainer.distributed import Ranks, shard
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.model.scorer import Scorer
from tba.trainer.preflight.shape import shape_of
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
config = Qwen2Config(vocab_size=640, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, tie_word_embeddings=False)
model = AutoModelForCausalLM.from_config(config)
shape = shape_of(model)
ranks = Ranks()
ranks.mesh = init_device_mesh("cpu", (4,))
scorer = Scorer(model, autocast=True)
shard(scorer, model._no_split_modules, ranks, autocast=True)
for module in (scorer, model.model.layers[0]):
    module.unshard()
    gathered = list(module.parameters(recurse=module is not scorer)) if module is not scorer else [
        model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight]
    assert {p.dtype for p in gathered} == {torch.bfloat16}, [p.dtype for p in gathered]
    print(sum(p.numel() * p.element_size() for p in gathered))
    module.reshard()
print(sum(p.to_local().numel() * 4 for p in model.parameters()))
print(shape.root, shape.largest_layer, shape.parameters)
"""


@pytest.mark.slow
def test_fsdp_gathers_root_and_layers_in_bfloat16_as_estimated():
    """A fake process group of four ranks: all-gathers allocate what real ones do, and move nothing."""
    result = subprocess.run([sys.executable, "-c", FSDP], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    root, layer, sharded, *counts = map(int, result.stdout.split())
    assert (root, layer) == (2 * counts[0], 2 * counts[1])
    # Each rank holds a quarter of every weight, rounded up to whole rows.
    assert sharded == pytest.approx(4 * counts[2] / 4, rel=0.01)


def test_what_fits_instead_is_computed_and_itself_fits():
    found = report("Qwen2.5-7B")
    assert not found.fits
    sentence = found.sentence()
    assert 'train.offload = "optimizer" with train.gradient_checkpointing = true (52.5 GB per GPU)' in sentence
    assert "3 GPUs with train.gradient_checkpointing = true (77.1 GB per GPU)" in sentence
    assert "lora.rank = 16 with train.gradient_checkpointing = true" in sentence
    assert report("Qwen2.5-7B", lora=16, gradient_checkpointing=True).fits


def test_advice_leaves_out_what_would_not_fit_the_host_and_is_given_where_the_host_is_too_small():
    # With offload, 7 B need 228 GB of the host; on three GPUs 91 GB, for a checkpoint.
    found = report("Qwen2.5-7B", host=160 * GIB)
    assert [text.split(" with ")[0] for text in found.instead] == ["3 GPUs", "lora.rank = 16"]
    found = report("Qwen2.5-7B", host=160 * GIB, offload="optimizer", gradient_checkpointing=True)
    assert found.fits_device
    assert "on the host" in found.sentence()
    assert found.instead[0].startswith("lora.rank = 16 (")


def test_advice_says_when_it_needs_more_gpus_than_the_node_has():
    sections = {"model": {"path": "m"}, "task": {"train": "t"}}
    for node, said in ((2, True), (3, False)):
        found = examine(
            Config.model_validate(sections), shape("Qwen2.5-7B"), ranks=1, gpu_total=H100, host_total=None, assumed=node
        )
        (more,) = (text for text in found.instead if text.startswith("3 GPUs"))
        assert (f", more than the {node} of this node)" in more) is said


def test_a_node_that_is_not_this_one_is_estimated_from_its_number_and_size_of_gpus(tmp_path):
    (tmp_path / "m").mkdir()
    CONFIGS["Qwen2.5-7B"].save_pretrained(tmp_path / "m")
    sections = {"model": {"path": str(tmp_path / "m")}, "task": {"train": "t"}}
    node = assumed_gpus("8x80")
    assert len(node) == 8
    assert abs((node[0].total_mib << 20) - H100) < 0.01 * H100
    for gpu, result in (("7", "fail"), ("4-7", "ok")):
        train = {"gpu": gpu, "gradient_checkpointing": True}
        found, detail = memory_found(Config.model_validate(sections | {"train": train}), node)
        assert found == result
        assert "GB on the host (loading" in detail or result == "fail"
    with pytest.raises(UsageError, match="--assume 8xH100: write the number of GPUs and the GB of each, such as 8x80"):
        assumed_gpus("8xH100")
    outside = Config.model_validate(sections | {"train": {"gpu": "8"}})
    assert memory_found(outside, node)[0] == "fail"


def test_a_trainer_has_what_the_engines_on_its_gpu_leave(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    node = assumed_gpus("2x80")
    whole = node[0].total_mib << 20

    def total(search: dict[str, Any], **other: Any) -> int:
        sections = {"model": {"path": str(model)}, "task": {"train": "t"}, "train": {"gpu": "0"}, "search": search}
        report = trainer_memory(Config.model_validate(sections | other), node)
        assert not isinstance(report, str)
        return not_none(report.gpu_total)

    assert total({"gpus": "1", "gpu_memory_utilization": 0.25}) == whole
    assert total({"gpus": "all", "gpu_memory_utilization": 0.25}) == whole, "all are all but the trainer's"
    assert total({"gpus": "0", "gpu_memory_utilization": 0.25}) == whole * 3 // 4
    assert total({"gpus": "0", "gpu_memory_utilization": 0.25}, eval={"gpu": "0"}) == whole // 2
    assert total({"gpus": "0", "gpu_memory_utilization": 0.9}) == whole, "that GPU 0 is of another node"


def test_an_engine_of_transformers_on_the_trainers_gpu_is_counted_by_hand(tmp_path):
    """Qwen2.5-7B in bfloat16: weights, keys and values of 28 layers with 4 heads of 128, logits of one step."""
    CONFIGS["Qwen2.5-7B"].save_pretrained(tmp_path)
    sections = {"model": {"path": str(tmp_path), "dtype": "bfloat16"}, "task": {"train": "t"}, "train": {"gpu": "0"}}
    search = {"engine": "transformers", "gpus": "0", "max_tokens": 976, "max_in_flight": 16}
    cache = 16 * 3000 * 2 * 28 * 512 * 2
    engine = 2 * PARAMETERS["Qwen2.5-7B"] + cache + 16 * 152064 * (2 + 4 * 4) + 2 * GIB

    def counted(search: dict[str, Any], **other: Any) -> int:
        found = trainer_memory(Config.model_validate(sections | {"search": search} | other), assumed_gpus("2x80"))
        assert isinstance(found, Report)
        assert not_none(found.gpu_total) == (assumed_gpus("1x80")[0].total_mib << 20) - found.engines
        assert ("besides engines of" in found.sentence()) == bool(found.engines)
        return found.engines

    assert counted(search) == engine
    assert counted(search, eval={"gpu": "0"}) == 2 * engine
    assert counted(search | {"gpus": "1"}) == 0
    elsewhere = {"address": "tcp://node0:5757"}
    assert counted(search, buffer=elsewhere) == 0, "which GPU 0 it is, is not known"
    assert counted(search | {"max_in_flight": "auto"}) > engine + 15 * cache


def test_advice_is_the_least_change_and_for_supervised_training_no_adapters():
    assert not any("lora" in text for text in report("Qwen2.5-7B", supervised=True).instead)
    found = report("rho-1b", total=48 * GIB)
    assert found.instead[0].startswith("train.gradient_checkpointing = true (")
    assert not found.states_fill
    assert report("Qwen2.5-7B").states_fill


def test_auto_sharding_keeps_weights_gathered_only_where_they_fit():
    assert report("rho-1b", 2).setup.gathered
    assert not report("Qwen2.5-7B", 3, gradient_checkpointing=True).setup.gathered
    assert report("Qwen2.5-7B", 3, sharding="optimizer").setup.gathered


def test_without_a_gpu_only_the_host_counts():
    found = report("rho-1b", total=None)
    assert found.fits
    assert not found.device
    small = replace(found, host_total=16 * GIB)
    assert not small.fits
    assert "on the host" in small.sentence()


def test_the_trainer_is_refused_before_it_loads_anything_and_may_be_started_all_the_same(tmp_path, monkeypatch):
    model = save_tiny_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    sections = {"model": {"path": str(model)}, "task": {"train": "t"}}
    least = SimpleNamespace(total_memory=2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: least)
    with pytest.raises(ConfigError, match="does not fit: .* of the 0.0 MB usable .*check_memory = false") as error:
        require_memory(Config.model_validate(sections), torch.device("cuda"), ALONE)
    assert error.value.exit_code == 78
    allowed = Config.model_validate(sections | {"train": {"check_memory": False}})
    assert not require_memory(allowed, torch.device("cuda"), ALONE).fits
    least.total_memory = H100
    assert require_memory(Config.model_validate(sections), torch.device("cuda"), ALONE).fits


def test_tba_run_and_doctor_look_at_the_memory_that_nvidia_smi_tells(tmp_path, monkeypatch):
    model = save_tiny_model(tmp_path / "model")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in --query-gpu=*) echo "0, GPU-a, 2100, 0"; echo "1, GPU-b, 81559, 0";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def config(gpu: str) -> Config:
        return Config.model_validate({"model": {"path": str(model)}, "task": {"train": "t"}, "train": {"gpu": gpu}})

    check_memory(config("1"))
    check_memory(config("cpu"))
    with pytest.raises(ConfigError, match="needs .* on each of 2 GPUs"):
        check_memory(config("0,1"))
    result, detail = memory_found(config("1"))
    assert result == "ok"
    assert detail.startswith("fits: the trainer needs")
    assert memory_found(config("0"))[0] == "fail"
    assert memory_found(config("cpu"))[0] == "ok"


def test_one_reason_is_given_for_memory_that_cannot_be_estimated(tmp_path, monkeypatch):
    model, gpu = save_tiny_model(tmp_path / "model"), [Gpu("0", "GPU-0aaa")]

    def why(path: object) -> tuple[str, str]:
        sections = {"model": {"path": str(path)}, "task": {"train": "t"}, "train": {"gpu": "0"}}
        return memory_found(Config.model_validate(sections), gpu)

    assert why("org/model") == ("unchecked", "the model's config.json is not on this machine")
    assert why(model) == ("unchecked", "nvidia-smi does not tell the memory of GPU 0")
    monkeypatch.setattr(before_start, "find_spec", lambda _: None)
    assert why(model) == ("unchecked", "torch is not installed here")


def test_flops_of_a_mixture_count_the_experts_that_compute_a_token():
    """Qwen3-30B-A3B: 3.35 B parameters are active, embeddings included; 30.5 B would be nine times too many."""
    experts = 3 * 2048 * 768
    active_layer = LAYERS["Qwen3-30B-A3B"] - (128 - 8) * experts
    head = 151936 * 2048
    assert 48 * active_layer + 2 * head == pytest.approx(3.35e9, rel=0.01)
    row = make_row(1, [1], [2, 3, 4])
    attention = 6 * 48 * 32 * 128 * 4**2
    by_hand = 6 * 4 * (48 * active_layer + 2048) + 6 * 3 * head + attention
    assert Throughput(meta("Qwen3-30B-A3B")).flops([row]) == by_hand


def test_a_scorer_under_autocast_has_float32_hidden_states_on_bfloat16_embeddings():
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
        dtype=torch.bfloat16,
    )
    Scorer(model, autocast=True)
    assert model.get_input_embeddings()(torch.tensor([1])).dtype == torch.float32


@pytest.mark.parametrize("part", [None, "text_config", "thinker_config"])
def test_a_quantized_policy_is_refused_before_anything_is_loaded(part, tmp_path):
    quantized: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(
        json.dumps({"vision_config": None} | ({part: quantized} if part else quantized))
    )
    with pytest.raises(ConfigError, match=r"are quantized \(quantization_config in config"):
        refuse_quantized(str(tmp_path))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_doctor_refuses_a_quantized_policy_by_the_same_sentence_and_no_reference(key, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(EXAMPLE_MODEL, model)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {key: {"quant_method": "gptq"}}))
    (found,) = all_checks(Plan(Config.model_validate({"model": {"path": str(model)}})), ["model"])
    with pytest.raises(ConfigError) as raised:
        refuse_quantized(str(model))
    assert (found.result, found.detail) == ("fail", str(raised.value))
    frozen = {"model": {"path": str(EXAMPLE_MODEL)}, "reference": {"path": str(model)}}
    found, other = all_checks(Plan(Config.model_validate(frozen)), ["model", "reference"])
    assert (found.result, other.result) == ("ok", "ok")
