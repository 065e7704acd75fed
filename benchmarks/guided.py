"""Guided starts (docs/tasks.md) on a task whose reward plain search hardly ever finds: spell a word backwards.

    python -m benchmarks.guided [--seeds 5] [--guided 0 0.5] [--steps 800] [--objective tb]

An untrained Llama of two layers gets five of eight letters, as in "bdaca:", and has a reward for "acadb" alone: of its
responses one in two million is right. One process and one loop, as in examples/one_page.py, on fresh data, with the
searcher's choice of guided groups, the buffer's pass rates, and the trainer's rows and objective. Printed are the right
ones of the plain responses, and the accuracy of greedy plain responses to words that were trained on, and to others.
"""

import argparse
import itertools
import json
import random
import time
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.buffer.service.curriculum import Curriculum
from tba.common.config import CurriculumSection, ObjectiveSection, SearchSection
from tba.common.wire.episode import one_turn
from tba.common.wire.messages import Visit
from tba.searcher.pipeline import Exploration
from tba.trainer.batch.batch import Row, counted
from tba.trainer.model.scorer import Scorer, sequence_logprobs
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.objectives.responses import Responses, Totals

LETTERS, LENGTH, WORDS, HELD_OUT = 8, 5, 32, 128
END, COLON = LETTERS, LETTERS + 1
PROMPTS, SAMPLES, BETA, RATE = 4, 16, 0.02, 2e-3
Word = tuple[int, ...]


def make_model(seed: int) -> Any:
    """Return an untrained model whose tokens are letters, an end and a colon."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=LETTERS + 2, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


@torch.no_grad()
def generate(model: Any, contexts: list[list[int]], most: list[int], rng: torch.Generator | None) -> list[list[int]]:
    """Return what follows contexts, at most so many tokens, sampled or without `rng` greedy. The end ends it."""
    found: list[list[int]] = [[] for _ in contexts]
    while live := [n for n, one in enumerate(found) if len(one) < most[n] and one[-1:] != [END]]:
        rows = [contexts[n] + found[n] for n in live]
        width = max(map(len, rows))
        ids = torch.tensor([row + [END] * (width - len(row)) for row in rows])
        logits = model(input_ids=ids).logits[range(len(rows)), [len(row) - 1 for row in rows]]
        drawn = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0] if rng else logits.argmax(1)
        for n, token in zip(live, drawn.tolist(), strict=True):
            found[n].append(token)
    return found


def accuracy(model: Any, words: list[Word]) -> float:
    """Return the share of words that the greedy policy spells backwards."""
    found = generate(model, [[*word, COLON] for word in words], [LENGTH + 1] * len(words), None)
    return mean(one == [*word[::-1], END] for one, word in zip(found, words, strict=True))


def run(seed: int, guided: float, steps: int, name: Any) -> dict[str, float]:
    """Train a model. Returns what is printed."""
    every = list(itertools.product(range(LETTERS), repeat=LENGTH))
    words = random.Random(seed).sample(every, WORDS + HELD_OUT)
    exploration = Exploration(SearchSection(guided=guided), run_seed=seed, searcher="")
    curriculum = Curriculum(CurriculumSection(answers=32), guided=guided > 0)
    policy, reference = (Scorer(make_model(seed), packed=False, autocast=False) for _ in range(2))
    objective = make_objective(ObjectiveSection(name=name), longest_response=LENGTH + 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    rng, started = torch.Generator().manual_seed(seed), time.monotonic()
    plain = plain_right = guided_right = guided_all = 0
    for step in range(steps):
        rows, rewards = [], []
        epoch, first = divmod(step * PROMPTS, WORDS)
        for number in range(first, first + PROMPTS):
            word, answer = words[number], [*words[number][::-1], END]
            part = exploration.guide(Visit(0, epoch, str(number), curriculum.guide(number)))
            prefix = answer[: round((part or 0.0) * (LENGTH - 1))]
            context = [*word, COLON, *prefix]
            found = generate(policy.model, [context] * SAMPLES, [LENGTH + 1 - len(prefix)] * SAMPLES, rng)
            own = [float(prefix + one == answer) for one in found]
            curriculum.note(number, [0] * SAMPLES, own, guided=part is not None)
            if part is None:
                plain, plain_right = plain + SAMPLES, plain_right + int(sum(own))
            else:
                guided_all, guided_right = guided_all + SAMPLES, guided_right + int(sum(own))
            rewards += own
            for one in found:
                runs, logprobs = np.array([[0, len(one)]], np.int32), np.zeros(len(one), np.float32)
                turn = one_turn(
                    np.array([*word, COLON]), np.array(one), logprobs, runs, prefix=np.array(prefix, np.int32)
                )
                mask = turn.loss_mask if len(turn.loss_mask) else np.ones(len(one), np.uint8)
                rows.append(Row(len(rows), turn.prompt_ids, turn.response_ids, turn.logprobs, mask, on_policy=True))
        loss = loss_of(policy, reference, objective, rows, rewards)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 199:
            seen = accuracy(policy.model, words[:WORDS])
            print(
                f"  step {step + 1}: seen {seen:.3f} guide {mean(map(curriculum.guide, range(WORDS))):.2f}", flush=True
            )
    return {
        "plain_right": plain_right, "plain": plain, "guided_right": guided_right, "guided": guided_all,
        "seen": accuracy(policy.model, words[:WORDS]), "others": accuracy(policy.model, words[WORDS:]),
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def loss_of(policy: Scorer, reference: Scorer, objective: Any, rows: list[Row], rewards: list[float]) -> torch.Tensor:
    """Return the loss of groups on fresh data."""
    lengths, mask_R, shape = [len(row.response_ids) for row in rows], counted(rows), (len(rows) // SAMPLES, SAMPLES)
    logprob_R = policy.score(rows).logprob_R
    with torch.no_grad():
        reference_N = sequence_logprobs(reference.score(rows).logprob_R, rows)
    responses = Responses(
        logprob_R=logprob_R,
        sampled_logprob_R=logprob_R.detach(),
        mask_R=mask_R,
        lengths=lengths,
        reward_bK=torch.tensor(rewards, dtype=torch.float64).view(shape),
        reference_bK=reference_N.view(shape),
        staleness_bK=torch.zeros(shape, dtype=torch.float64),
        totals=Totals(shape[0], len(rows), int(mask_R.sum())),
    )
    loss: torch.Tensor = objective.loss(responses, BETA)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--guided", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--objective", default="tb")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for guided in options.guided:
        found = []
        for seed in options.seeds:
            found.append(run(seed, guided, options.steps, options.objective))
            print(json.dumps({"guided_share": guided, "seed": seed, **found[-1]}), flush=True)
        for name in ("seen", "others"):
            values = [one[name] for one in found]
            error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            print(f"guided {guided:g}: accuracy of {name} {mean(values):.3f} +- {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
