"""Loss and gradient on a real model against TRL's trainers.

TRL pads rows to a rectangle, computes full logits and has its own losses. Both get the same trajectories, weights and
rewards.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tba.common.config import TrainSection
from tba.tests.helpers.trainer import LONGEST_RESPONSE, learner_of, make_batch, make_row, objective, tiny_model
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.objectives import advantages

# Imported by the tests that run: `make quick`, which leaves them out, would import both for seconds.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (find_spec("trl") and find_spec("datasets")), reason="TRL is not installed"),
]

BETA = 0.3
SETTINGS: dict[str, Any] = {"vocabulary": 8, "seed": 3}
KEYS = {"beta": BETA, "beta_final": BETA, "beta_anneal_steps": 0, "learning_rate": 0.01, "warmup_steps": 0}


def tokenizer():
    """Return a tokenizer of eight words, which TRL's trainers require."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{n}": n for n in range(8)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w2")


def stale_batch(samples: int = 4, temperature: float = 1.0) -> TrainBatch:
    """Return trajectories of several lengths, sampled by another policy at a temperature."""
    rng = np.random.default_rng(4)
    rows: list[Row] = []
    for _ in range(3):
        prompt = rng.integers(1, 8, size=rng.integers(2, 5))
        for _ in range(samples):
            response = rng.integers(1, 8, size=rng.integers(1, 9))
            sampled = (-2.0 + 0.4 * rng.standard_normal(len(response))).astype(np.float32)
            fields = {"sampling_logprobs": sampled, "temperature": temperature}
            rows.append(make_row(len(rows), prompt, response, **fields))
    return make_batch(rows, rng.random((3, samples)))


def ours(name: str, batch: TrainBatch, **keys) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a step in micro-batches of one group, before clipping."""
    policy = tiny_model(**SETTINGS)
    config = TrainSection.model_validate(KEYS | {"micro_batch_tokens": 16, "max_grad_norm": 1e9})
    learner = learner_of(policy, tiny_model(vocabulary=8, seed=9), config, objective(name, **keys))
    kept: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: kept.append(flat_gradient(policy)))
    return learner.step(batch).metrics["loss"], kept[0]


def flat_gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def padded(batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Convert a batch to TRL's format: prompts padded on the left, completions on the right."""

    def pad(values, side):
        return torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(np.array(value)) for value in values], batch_first=True, padding_side=side
        )

    prompts, responses = [row.prompt_ids for row in batch.rows], [row.response_ids for row in batch.rows]
    return {
        "prompt_ids": pad(prompts, "left").long(),
        "prompt_mask": pad([np.ones_like(p) for p in prompts], "left").long(),
        "completion_ids": pad(responses, "right").long(),
        "completion_mask": pad([np.ones_like(r) for r in responses], "right").long(),
        "old_per_token_logps": pad([row.sampling_logprobs for row in batch.rows], "right"),
        "old_logps": torch.tensor([float(row.sampling_logprobs.sum()) for row in batch.rows]),
        "num_items_in_batch": torch.tensor(sum(len(r) for r in responses)),
    }


def make_trainer(kind: str, directory: Path, **settings):
    """Return one of TRL's trainers, on the CPU and with the same weights."""
    import datasets
    import trl

    common = {
        "output_dir": str(directory), "use_cpu": True, "report_to": [], "bf16": False, "num_generations": 4,
        "per_device_train_batch_size": 12, "max_completion_length": LONGEST_RESPONSE, "beta": 0.0,
        "gradient_checkpointing": False, "temperature": 1.0,
    }  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        model=tiny_model(**SETTINGS),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=getattr(trl, f"{kind}Config")(**common | settings),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1 w3"}] * 3),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def theirs(trainer, inputs: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    loss = trainer._compute_loss(trainer.model, inputs)
    torch.autograd.backward(loss)
    return loss.item(), flat_gradient(trainer.model)


def agree(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert torch.allclose(found[1], expected[1], atol=1e-5 * float(expected[1].abs().max()) + 1e-7, rtol=1e-4)
    assert expected[1].abs().max() > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("name", "loss_type", "advantage"),
    [
        ("grpo", "grpo", advantages.standardised),
        ("dr_grpo", "dr_grpo", advantages.centred),
        ("ppo_clip", "dapo", advantages.leave_one_out),
        ("cispo", "cispo", advantages.standardised),
    ],
)
def test_token_level_objectives_equal_those_of_trl(tmp_path, name, loss_type, advantage, temperature):
    batch = stale_batch(temperature=temperature)
    high = {"epsilon_high": 5.0} if name == "cispo" else {}
    trainer = make_trainer(
        "GRPO", tmp_path, loss_type=loss_type, epsilon=0.2, steps_per_generation=1, temperature=temperature, **high
    )
    inputs = padded(batch) | {"advantages": advantage(batch.reward_BK).flatten().float()}
    agree(ours(name, batch), theirs(trainer, inputs))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_proximal_rloo_equals_the_rloo_of_trl(tmp_path, temperature):
    batch = stale_batch(temperature=temperature)
    trainer = make_trainer("RLOO", tmp_path, epsilon=0.2, steps_per_generation=1, temperature=temperature)
    inputs = padded(batch) | {"advantages": advantages.leave_one_out(batch.reward_BK).flatten().float()}
    agree(ours("proximal_rloo", batch), theirs(trainer, inputs))


def test_online_dpo_equals_the_dpo_of_trl_on_best_and_worst(tmp_path):
    import datasets
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    batch = stale_batch(samples=2)
    trainer = DPOTrainer(
        model=tiny_model(**SETTINGS),
        ref_model=tiny_model(vocabulary=8, seed=9),
        args=DPOConfig(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False, beta=BETA, gradient_checkpointing=False,
            loss_type=["sigmoid"],
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1", "chosen": "w3", "rejected": "w4"}] * 3),
        processing_class=tokenizer(),
    )  # fmt: skip
    best, worst = batch.reward_BK.argmax(1).tolist(), batch.reward_BK.argmin(1).tolist()
    rows = [batch.rows[2 * b + k] for order in (best, worst) for b, k in enumerate(order)]
    ids = [torch.tensor([*row.prompt_ids, *row.response_ids]) for row in rows]
    counted = [torch.tensor([0] * len(row.prompt_ids) + [1] * len(row.response_ids)) for row in rows]
    inputs = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "completion_mask": torch.nn.utils.rnn.pad_sequence(counted, batch_first=True),
    }
    loss = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    torch.autograd.backward(loss)
    agree(ours("online_dpo", batch), (loss.item(), flat_gradient(trainer.model)))
