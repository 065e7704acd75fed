"""LoRA: what is trained, merged and resumed, and adapters from a publisher to a node, on a base published once."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tba.common.clock import SystemClock
from tba.common.config import Config, LoraSection, TrainSection
from tba.common.errors import CheckpointError, ConfigError, SnapshotCorrupt, SnapshotError
from tba.common.system.durable import sha256_of
from tba.common.weights import adapter, snapshot
from tba.common.weights.node_store import clear
from tba.common.weights.tensor_file import map_tensors
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers import trainer
from tba.tests.helpers.architectures import ARCHITECTURES, SHAPE
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import in_float64, learner_of, objective, random_batch, save_tiny_model, tiny_model
from tba.tests.helpers.weights import WEIGHTS, CountingServer, flip_a_byte
from tba.tests.runner import slow
from tba.trainer import checkpoint
from tba.trainer.distributed import ALONE
from tba.trainer.model.adapters import MERGED, add_adapters, gathered, without_adapters
from tba.trainer.model.scorer import Scorer, weights_of
from tba.trainer.publishing.snapshot_writer import check_names
from tba.trainer.step.build import build
from tba.trainer.step.learner import Learner

pytestmark = pytest.mark.slow

LORA = {"rank": 3, "alpha": 4.0, "publish": "adapter"}
FULL = "model.safetensors"


@pytest.fixture
def lab(publisher_harness):
    return publisher_harness(dtype="bfloat16", lora=LORA, steps=99)


@pytest.fixture
def copies(tmp_path):
    return SnapshotAssembler(tmp_path / "node", "path", SystemClock())


def publish(lab, publisher, steps) -> None:
    for step in steps:
        if step:
            lab.train_adapters(step)
        publisher.publish(step)
        assert publisher.flush(60)


def policy(found: snapshot.Snapshot) -> dict[str, torch.Tensor]:
    """The weights that an engine serves of an assembled snapshot, in float32."""
    weights = {name: tensor.float() for name, tensor in load_file(found.weight_files[0]).items()}
    if found.adapter is not None:
        loaded = adapter.load(found.adapter)
        for name in loaded.factors:
            weights[name] += torch.from_numpy(loaded.change(name))
    return weights


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], one, atol=tolerance, rtol=tolerance) for name, one in theirs.items()
    )


def kinds(lab) -> list[tuple[int, int, int | None]]:
    """(version, step, base) of the snapshots on disk, oldest first."""
    manifests = [snapshot.read(path).manifest for path in snapshot.list_snapshots(lab.config.snapshots)]
    return [(manifest.version, manifest.step, manifest.base) for manifest in manifests]


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
@pytest.mark.parametrize("tie", [True, False])
def test_base_and_adapter_on_a_node_are_the_trainers_policy_and_its_canary(publisher_harness, copies, dtype, tie):
    lab = publisher_harness(dtype=dtype, tie=tie, lora=LORA, steps=99)
    publisher = lab.publisher()
    for step in range(5):
        publish(lab, publisher, [step])
        found, pinned = copies.assemble(lab.announced_ref())
        assert (found.adapter is None) is (step == 0)
        assert same(policy(found), lab.merged())
        pinned.release()
    fresh = AutoModelForCausalLM.from_pretrained(lab.config.snapshots / "v00000000", dtype=torch.float32)
    fresh.load_state_dict(policy(found), strict=False)
    assert_canary_holds(fresh, found.manifest.canary)


def assert_canary_holds(model, canary: snapshot.Canary) -> None:
    """Check the first sequence of a canary against a model in float32."""
    tokens = torch.tensor(canary.sequences[:1])
    logits = model(input_ids=tokens).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].detach()
    assert np.allclose(canary.logprobs[0], expected, atol=1e-5, rtol=0)


def test_an_adapter_snapshot_is_a_peft_adapter_and_nothing_else(lab):
    from peft import PeftModel

    publish(lab, lab.publisher(), [0, 1])
    found = lab.announced()
    assert {path.name for path in found.path.iterdir()} == {adapter.FILE, adapter.CONFIG, "manifest.json"}
    assert (found.manifest.base, found.adapter, found.weight_files) == (0, found.path, [])
    base = lab.config.snapshots / "v00000000"
    assert found.manifest.complete == snapshot.read(base).manifest.files
    assert json.loads((found.path / adapter.CONFIG).read_text())["base_model_name_or_path"] == str(base)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base).float(), found.path)
    merged = merged.merge_and_unload().state_dict()
    assert all(torch.allclose(merged[name], tensor, atol=1e-5) for name, tensor in lab.merged().items())


def test_the_snapshot_of_step_0_is_the_base_and_kept_ones_and_the_last_are_full(publisher_harness):
    lab = publisher_harness(dtype="bfloat16", lora=LORA, keep_snapshots=99, keep_snapshot_every=3, steps=5)
    publish(lab, lab.publisher(), range(6))
    assert kinds(lab) == [(0, 0, None), (1, 1, 0), (2, 2, 0), (3, 3, None), (4, 4, 0), (5, 5, None)]
    for version, step in ((3, 3), (5, 5)):
        lab.train_adapters(step)
        complete = lab.config.snapshots / f"v{version:08d}"
        rounded = {name: tensor.bfloat16().float() for name, tensor in lab.merged().items()}
        assert same(policy(snapshot.read(complete)), rounded, tolerance=2**-7)
        assert AutoModelForCausalLM.from_pretrained(complete).dtype == torch.bfloat16
        in_float32 = AutoModelForCausalLM.from_pretrained(complete, dtype=torch.float32)
        assert_canary_holds(in_float32, snapshot.read(complete).manifest.canary)


def test_the_base_is_kept_although_it_is_neither_new_nor_the_first(publisher_harness):
    lab = publisher_harness(dtype="bfloat16", lora=LORA, keep_snapshots=2, keep_snapshot_every=10, steps=99)
    publish(lab, lab.publisher(publish="merged"), [4])
    publisher = lab.publisher(next_version=1)
    publish(lab, publisher, [5, 6, 7, 8])
    assert kinds(lab) == [(0, 4, None), (1, 0, None), (4, 7, 1), (5, 8, 1)]
    # The first two are full: for a while none of the newest is on the base.
    publish(lab, publisher, [10, 20, 21])
    assert kinds(lab) == [(0, 4, None), (1, 0, None), (6, 10, None), (7, 20, None), (8, 21, 1)]


def test_a_base_is_published_again_after_a_restart_or_its_deletion_but_not_with_the_last_snapshot(
    publisher_harness, copies
):
    lab = publisher_harness(dtype="bfloat16", lora=LORA, steps=5)
    publish(lab, lab.publisher(), [0, 1])
    publisher = lab.publisher(next_version=2)
    publish(lab, publisher, [2, 3])
    assert kinds(lab) == [(0, 0, None), (1, 1, 0), (2, 0, None), (3, 2, 2), (4, 3, 2)]
    shutil.rmtree(lab.config.snapshots / "v00000002")
    publish(lab, publisher, [4])
    assert kinds(lab)[-2:] == [(5, 0, None), (6, 4, 5)]
    found, _ = copies.assemble(lab.announced_ref())
    assert same(policy(found), lab.merged())
    publish(lab, lab.publisher(next_version=7), [5])
    assert kinds(lab)[-1] == (7, 5, None)


def test_a_base_that_comes_later_is_no_policy_and_does_not_count_as_the_newest(lab):
    directory = lab.config.snapshots
    publish(lab, lab.publisher(publish="merged"), [7])
    # Resumed from an older checkpoint: what the run had reached is abandoned.
    publish(lab, lab.publisher(next_version=1), [5])
    # As before it was written.
    shutil.rmtree(directory / "v00000002")
    assert kinds(lab) == [(0, 7, None), (1, 0, None)]
    assert snapshot.choose_snapshots(directory, directory, None, every=False) == [directory / "v00000000"]
    assert snapshot.choose_snapshots(directory, directory, None, every=True) == [directory / "v00000000"]
    publish(lab, lab.publisher(next_version=3), [5])
    assert snapshot.choose_snapshots(directory, directory, None, every=False) == [directory / "v00000004"]


def test_a_node_that_joins_late_fetches_the_base_and_one_adapter_and_then_adapters_alone(lab, tmp_path):
    publisher = lab.publisher()
    publish(lab, publisher, [0, 1, 2, 3])
    server = CountingServer("tcp://127.0.0.1:*", lab.config.snapshots)
    copies = SnapshotAssembler(tmp_path / "node", "trainer", SystemClock())
    for step in range(4, 12):
        ref = replace(lab.announced_ref(), address=server.address)
        found, held = copies.assemble(ref)
        held.release()
        assert same(policy(found), lab.merged())
        publish(lab, publisher, [step])
    server.close()
    sizes = {name: entry.bytes for name, entry in found.manifest.files.items()}
    assert server.served[FULL] == not_none(found.manifest.complete)[FULL].bytes
    assert server.served[adapter.FILE] == 8 * sizes[adapter.FILE]
    # The base, and the newest two.
    assert len(list((tmp_path / "node").glob("v*"))) == 3


def test_a_searcher_whose_neighbour_merged_keeps_the_base_as_well(lab, tmp_path):
    publisher = lab.publisher()
    neighbour, mine = (SnapshotAssembler(tmp_path / "node", "path", SystemClock()) for _ in range(2))
    for step in range(5):
        publish(lab, publisher, [step])
        ref = lab.announced_ref()
        for copies in (neighbour, mine):
            copies.assemble(ref)[1].release()
    neighbour.remove_created()
    mine.assemble(ref)[1].release()
    assert list((tmp_path / "node").glob("v00000000-*"))
    mine.close()
    clear(tmp_path / "node")
    assert not (tmp_path / "node").exists()


def test_a_refresh_replaces_a_damaged_base_on_the_node(lab, copies):
    publisher = lab.publisher()
    for step in range(3):
        publish(lab, publisher, [step])
        copies.assemble(lab.announced_ref())[1].release()
    (base,) = copies._cache.directory.glob("v00000000-*")
    # Its file is a hard link to the trainer's.
    shutil.copyfile(base / WEIGHTS, base / "copy")
    (base / "copy").replace(base / WEIGHTS)
    map_tensors(base / WEIGHTS, writable=True)["model.layers.0.mlp.up_proj.weight"].bits[:] ^= 1
    publish(lab, publisher, [3])
    found, _ = copies.assemble(lab.announced_ref(), refresh=True)
    assert same(policy(found), lab.merged())


@pytest.mark.parametrize("serves", ["the same searcher", "an idle neighbour"])
def test_a_damaged_base_that_a_searcher_serves_does_not_stop_adapters(lab, tmp_path, serves):
    publisher = lab.publisher()
    publish(lab, publisher, [0])
    copies = SnapshotAssembler(tmp_path / "node", "path", SystemClock())
    server = copies if serves == "the same searcher" else SnapshotAssembler(tmp_path / "node", "path", SystemClock())
    served, held = server.assemble(lab.announced_ref())
    # A separate file instead of a hard link to the trainer's.
    (served.path / "copy").write_bytes((served.path / WEIGHTS).read_bytes())
    (served.path / "copy").replace(served.path / WEIGHTS)
    flip_a_byte(served.path / WEIGHTS)
    damaged = (served.path / WEIGHTS).read_bytes()
    for step in (1, 2):
        publish(lab, publisher, [step])
        found, newer = copies.assemble(lab.announced_ref(), refresh=True)
        newer.release()
        assert same(policy(found), lab.merged())
        assert not (found.path / "chain").exists()
        assert (served.path / WEIGHTS).read_bytes() == damaged
    held.release()
    publish(lab, publisher, [3])
    copies.assemble(lab.announced_ref())
    assert sha256_of(served.path / WEIGHTS) == sha256_of(lab.config.snapshots / "v00000000" / WEIGHTS)


@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_missing_or_damaged_adapter_is_refused_and_the_next_one_goes(lab, copies, damage):
    publisher = lab.publisher()
    publish(lab, publisher, [0, 1])
    damage(lab.config.snapshots / "v00000001" / adapter.FILE)
    with pytest.raises(SnapshotError, match="v00000001"):
        copies.assemble(lab.announced_ref())
    publish(lab, publisher, [2])
    found, _ = copies.assemble(lab.announced_ref())
    assert same(policy(found), lab.merged())


def reseal(path: Path, **changes) -> str:
    """Change fields of a manifest that no node has read yet. Returns its new hash."""
    fields = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(fields))
    return sha256_of(path / "manifest.json")


def test_an_adapter_that_does_not_fit_its_base_and_a_manifest_that_contradicts_itself_are_refused(lab, copies):
    publish(lab, lab.publisher(), [0, 1])
    ref, path = lab.announced_ref(), lab.config.snapshots / "v00000001"
    complete = json.loads((path / "manifest.json").read_text())["complete"]
    digest = reseal(path, complete=complete | {FULL: complete[FULL] | {"blake3": "0" * 64}})
    with pytest.raises(SnapshotCorrupt, match="names other files than its base has"):
        copies.assemble(replace(ref, manifest_sha256=digest))
    entry = {"bytes": 1, "blake3": "0" * 64}
    change = {"file": entry, "bytes": 1, "base": 0, "base_manifest_sha256": "0" * 64}
    for fields, reason in (({"files": {}}, "does not describe the result"), ({"delta": change}, "cannot be a delta")):
        reseal(path, **fields)
        with pytest.raises(SnapshotCorrupt, match=reason):
            snapshot.read(path)


def test_a_layer_that_the_files_store_in_another_form_is_refused_with_what_to_do():
    weights = {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2, 3), "c.weight": torch.zeros(2, 3)}
    saved = {"a.weight": weights["a.weight"], "renamed": weights["b.weight"], "c.weight": weights["c.weight"].T}
    check_names(["a.weight"], weights, saved)
    for name in ("b", "c"):
        with pytest.raises(ConfigError, match=rf'{name}\.weight.*lora\.publish = "merged"'):
            check_names([f"{name}.weight"], weights, saved)


def test_a_missing_or_malformed_adapter_is_corrupt(tmp_path):
    with pytest.raises(SnapshotCorrupt, match="no readable adapter"):
        adapter.load(tmp_path)
    factors = {"x.q_proj.weight": adapter.Factors(np.ones((2, 3), np.float32), np.ones((4, 2), np.float32))}
    adapter.save(tmp_path, adapter.Adapter(factors, 0.5), rank=2, base=tmp_path)
    assert adapter.load(tmp_path).change("x.q_proj.weight").tolist() == [[1.0] * 3] * 4
    (tmp_path / adapter.CONFIG).write_text("{}")
    with pytest.raises(SnapshotCorrupt, match="no readable adapter"):
        adapter.load(tmp_path)


KEYS = {"learning_rate": 0.05, "steps": 10}


def make_learner(*, tie: bool = False, **settings) -> Learner:
    return trainer.make_learner(model={"tie": tie, "layers": 2}, lora=LoraSection(rank=2, alpha=3.0), **KEYS | settings)


def run_steps(learner: Learner, count: int) -> list[dict[str, float]]:
    return [learner.step(random_batch(learner.steps_done)).metrics for _ in range(count)]


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return Scorer(model).score(random_batch(7).rows).logprob_R


@pytest.mark.parametrize("tie", [True, False])
def test_merged_weights_give_the_log_probabilities_of_base_and_adapters(tie):
    learner = make_learner(double=True, tie=tie)
    run_steps(learner, 3)
    plain = in_float64(tiny_model(tie=tie, layers=2, seed=9))
    assert weights_of(plain).keys() == dict(gathered(learner.policy, MERGED)).keys()
    plain.load_state_dict(dict(gathered(learner.policy, MERGED)), strict=False)
    assert torch.allclose(logprobs(plain), logprobs(learner.policy), atol=1e-12, rtol=0)
    assert not torch.allclose(logprobs(learner.policy), logprobs(in_float64(tiny_model(tie=tie, layers=2))), atol=1e-3)


def test_the_reference_is_the_base_bit_for_bit_before_and_after_training():
    learner, base = make_learner(), logprobs(tiny_model(layers=2))
    # B starts at zero.
    assert torch.equal(logprobs(learner.policy), base)
    run_steps(learner, 3)
    assert not torch.equal(logprobs(learner.policy), base)
    with without_adapters(learner.policy):
        assert torch.equal(logprobs(learner.policy), base)
    batch = random_batch(5)
    found = learner.step(batch).reference
    other = learner_of(tiny_model(seed=1), tiny_model(layers=2), TrainSection(), objective())
    assert found == other.step(batch).reference


def test_only_adapters_change_and_only_they_have_optimiser_states():
    learner = make_learner()
    before = {name: tensor.clone() for name, tensor in weights_of(learner.policy).items()}
    run_steps(learner, 2)
    changed = {name for name, tensor in weights_of(learner.policy).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(learner.optimizer.state_dict()["state"]) == len(changed)


def make_config(root, **lora) -> Config:
    return Config.model_validate({"model": {"path": str(root)}, "lora": {"rank": 2} | lora, "train": {"gpu": "cpu"}})


def built(root, **lora) -> Learner:
    return build(make_config(root, **lora), root, torch.device("cpu"), ALONE)[0]


def test_adapters_of_another_base_or_with_other_settings_are_refused(tmp_path):
    files = save_tiny_model(tmp_path / "model")
    learner = built(files)
    run_steps(learner, 1)
    path = checkpoint.save(tmp_path / "checkpoints", learner, run="r", keep=1)
    assert all(".lora_" in name for name in load_file(path / FULL)), "the base is not in the file"
    found = not_none(checkpoint.newest(tmp_path / "checkpoints"))
    checkpoint.restore(found, built(files))
    with pytest.raises(CheckpointError, match="'alpha': 32.0.*'alpha': 8.0"):
        checkpoint.restore(found, built(files, alpha=8.0))
    with pytest.raises(CheckpointError, match="must stay what they were"):
        checkpoint.restore(found, built(files, rank=0))
    shutil.rmtree(files)
    with pytest.raises(CheckpointError, match="the files under model.path must stay what they were"):
        checkpoint.restore(found, built(save_tiny_model(files, seed=5)))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "nothing"], 'nothing, no layer of the model: name .*q_proj.*or set "all"'),
        (["lm_head"], 'lm_head, which cannot have an adapter: name .*q_proj.*or set "all"'),
    ],
)
def test_targets_that_cannot_have_adapters_are_refused(tmp_path, targets, message):
    with pytest.raises(ConfigError, match=message):
        built(save_tiny_model(tmp_path / "model"), targets=targets)


# Besides those of tests/helpers/architectures.py: mixtures with shared experts, and layers with a state.
MORE = {
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    },
    "qwen3_next": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 4, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_state": 8},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
}  # fmt: skip
QUICK = ["mixtral", "deepseek_v3", "glm4_moe", "falcon_mamba"]
# The layers that have no adapter though they are linear: the head, and what kernels of Mamba read without a call.
NEVER = ("lm_head", "embed_out", "mixer.dt_proj", "mixer.out_proj", "mamba.dt_proj", "mamba.out_proj")


@pytest.mark.parametrize("name", [*QUICK, *slow(*[one for one in [*ARCHITECTURES, *MORE] if one not in QUICK])])
def test_all_targets_are_the_plain_linear_layers_and_each_adapter_learns(name):
    kind, settings = ARCHITECTURES.get(name) or (name, MORE[name])
    assert isinstance(settings, dict)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | settings)))
    expected = {at for at, one in model.named_modules() if type(one) is torch.nn.Linear and not at.endswith(NEVER)}
    if not expected:
        with pytest.raises(ConfigError, match=r"no plain linear ones; set lora.rank = 0"):
            add_adapters(model, LoraSection(rank=2))
        return
    add_adapters(model, LoraSection(rank=2))
    adapted = {at: one for at, one in model.named_modules() if hasattr(one, "lora_A")}
    assert adapted.keys() == expected
    for one in adapted.values():
        torch.nn.init.normal_(one.lora_B["default"].weight)
    model(input_ids=torch.arange(32)[None], use_cache=False).logits.log_softmax(-1)[..., 3].sum().backward()
    assert [at for at, one in adapted.items() if not one.lora_A["default"].weight.grad.any()] == []


def test_layers_that_share_a_weight_have_no_adapters():
    """Zamba2 has blocks of attention with the same weights: each would have an adapter, and one would be published."""
    settings = {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3], "num_hidden_layers": 4,
        "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_d_state": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("zamba2", **(SHAPE | settings)))
    layers = {at: one for at, one in model.named_modules() if type(one) is torch.nn.Linear}
    uses = Counter(id(one.weight) for one in layers.values())
    shared = {at for at, one in layers.items() if uses[id(one.weight)] > 1}
    assert {name.rpartition(".")[2] for name in shared} >= {"q_proj", "o_proj", "down_proj"}
    add_adapters(model, LoraSection(rank=2))
    adapted = {at for at, one in model.named_modules() if hasattr(one, "lora_A")}
    assert adapted
    assert not adapted & shared
