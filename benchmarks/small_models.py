"""Small Llamas over the characters of arithmetic, made in seconds: policies, and classifiers that score texts.

Shape suffixes: N rows, T tokens of the longest.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from benchmarks.off_policy.sampling import Response, respond
from benchmarks.off_policy.setting import WARMUP_STEPS, objective_section
from benchmarks.off_policy.tasks import Problem, Task
from examples.arithmetic.make_model import build_tokenizer, save, train
from tba.common.config import ScoringModelSection, TrainSection
from tba.searcher.scoring.classifier import RewardModel
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.step.learner import Learner

FOLDER = Path("models/benchmarks")
CLASSIFIER_RATE = 2e-3
CPU = torch.device("cpu")

# Texts, and the loss of their logits.
LabelledTexts = tuple[list[str], Callable[[Tensor], Tensor]]


def make_policy(name: str, demonstrations: Iterator[list[tuple[str, str]]], steps: int) -> Path:
    """Train a policy on pairs of prompt and response, and save it. One that is there is used again."""
    path = FOLDER / name
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = LlamaForCausalLM(_config(tokenizer))
        train(model, tokenizer, demonstrations, steps)
        save(model, tokenizer, path)
    return path


def make_classifier(name: str, batches: Iterator[LabelledTexts], steps: int) -> Path:
    """Train a classifier with one label on batches of texts, and save it. One that is there is used again."""
    path = FOLDER / name
    if (path / "config.json").exists():
        return path
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = LlamaForSequenceClassification(_config(tokenizer, num_labels=1)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CLASSIFIER_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        texts, loss_of = next(batches)
        rows = [tokenizer.encode(text) for text in texts]
        longest = max(map(len, rows))
        ids_NT = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        optimizer.zero_grad()
        loss = loss_of(model(input_ids=ids_NT, attention_mask=ids_NT != tokenizer.pad_token_id).logits[:, 0])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def scorer_of(path: Path) -> Callable[[Sequence[tuple[str, str]]], list[float]]:
    """Return a function of pairs of prompt and response to logits: the reward model of a searcher."""
    model = RewardModel(path, ScoringModelSection(path=str(path)), "cpu")

    def score(pairs: Sequence[tuple[str, str]]) -> list[float]:
        encoded = [model.encode(*pair) for pair in pairs]
        found = [0.0] * len(pairs)
        for batch in model.batches(encoded):
            for place, logit in zip(batch, model.score([encoded[n] for n in batch], lambda *_: None), strict=True):
                assert isinstance(logit, float)
                found[place] = logit
        return found

    return score


def make_learner(path: Path, objective: str, *, rate: float, beta: float, steps: int, longest: int) -> Learner:
    """Return the trainer's step for a policy: a constant rate after a short warm-up, and a constant beta."""
    policy, reference = (load_model(path, CPU) for _ in range(2))
    section = TrainSection(
        steps=steps, learning_rate=rate, schedule="constant", warmup_steps=WARMUP_STEPS, beta=beta, beta_final=beta
    )
    made = make_objective(objective_section(objective), longest_response=longest)
    return Learner(policy, reference, section, made, autocast=False)


def sample(
    learner_or_model: Learner | LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    longest: int,
    end: int,
    generator: torch.Generator | None,
    step: int = 0,
) -> list[Response]:
    """Return a response, without a reward, to each prompt; all prompts have the same length."""
    model = learner_or_model.policy if isinstance(learner_or_model, Learner) else learner_or_model
    task = Task("", Path(), longest, graded=False, end=end, training=[], held_out={})
    return respond(model, task, [Problem(tuple(prompt), ()) for prompt in prompts], generator, step)


def _config(tokenizer: PreTrainedTokenizerFast, **changes: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **changes,
    )
