"""Trajectory Balance on one page: sample, score, loss, step, swap, in one process and one loop.

    python examples/one_page.py          # about a minute on a laptop: 40 % of two-digit sums are right, then 87 %

It uses the engine, task, objective, scorer and snapshots that `tba run` uses. What the processes of `tba run` add:

1. Searchers sample without pause while the trainer computes (`tba search`): rows are then a few steps old, which the
   loss below corrects for. Here every row is sampled for its step.
2. A buffer stores every row in SQLite and draws batches by recency or reward (`tba buffer serve`). Here rows are
   forgotten after their step.
3. Rewards run in processes of their own, with limits of time and memory. Here `task.score` is called.
4. The trainer packs rows, computes in bfloat16 on several GPUs, writes checkpoints, and repeats its steps after a kill
   (`tba train`).
5. Snapshots travel in memory, or to other nodes as differences. Here they are files that this process reads back.
"""

import argparse
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
import torch

from tba.common.config import ObjectiveSection
from tba.common.system.durable import temporary_directory
from tba.common.weights.model_files import eos_ids
from tba.common.weights.pretrained import load_tokenizer
from tba.common.weights.snapshot import Canary, Manifest, Snapshot, describe_files, directory_name, read, seal
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.searcher.engines.transformers_engine import TransformersEngine
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Prompt
from tba.trainer.batch.batch import Row, counted
from tba.trainer.model.scorer import Scorer, load_model
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.objectives.responses import Responses, Totals

MODEL = Path(__file__).parent / "arithmetic/model"
PROMPTS, SAMPLES, MAX_TOKENS, BETA, LEARNING_RATE = 32, 8, 6, 0.1, 1e-5
_numbers = count(1)


class Sampler:
    """An engine, and what a task needs to score its responses."""

    def __init__(self, seed: int) -> None:
        self.tokenizer, self.task = load_tokenizer(MODEL), ArithmeticTask()
        self.stopping = Stopping(self.tokenizer, (), eos_ids(MODEL))
        self.engine = TransformersEngine(
            str(MODEL), dtype="float32", device="cpu", max_in_flight=PROMPTS * SAMPLES, seed=seed,
            canary_tolerance=1e-3, stopping=self.stopping,
        )  # fmt: skip

    def rows(self, prompts: list[Prompt], samples: int, temperature: float) -> tuple[list[Row], list[float]]:
        """Sample responses to each prompt. Returns the rows, group after group, and their rewards."""
        asked = {next(_numbers): prompt for prompt in prompts for _ in range(samples)}
        ids = {prompt.key: np.asarray(self.tokenizer.encode(prompt.text), np.int32) for prompt in prompts}
        for number, prompt in asked.items():
            settings = SamplingSettings(temperature, top_p=1.0, max_tokens=MAX_TOKENS)
            self.engine.submit(GenerationRequest(number, ids[prompt.key], settings))
        answers = {}
        while self.engine.in_flight:
            answers |= {answer.id: answer for answer in self.engine.step()}
        rows, rewards = [], []
        for number, prompt in asked.items():
            tokens, finished = answers[number].response_ids, answers[number].stop_reason == "eos"
            rewards.append(self.task.score(prompt, self.stopping.scored_text(tokens), finished).total)
            mask = np.ones(len(tokens), np.uint8)
            rows.append(Row(number, ids[prompt.key], tokens, answers[number].logprobs, mask, on_policy=True))
        return rows, rewards

    def accuracy(self) -> float:
        """Return the share of the held-out prompts that greedy decoding answers rightly."""
        return float(np.mean(self.rows(list(self.task.held_out()), samples=1, temperature=0.0)[1]))


def loss_of(scorer: Scorer, reference: Scorer, objective, rows: list[Row], rewards: list[float]) -> torch.Tensor:
    """Return the Trajectory Balance loss of whole groups, a scalar with the gradient of the policy.

    For a prompt with K responses y_k: log Z = mean of (log p_ref(y_k) + r_k / beta - log p(y_k)), without gradient, and
    the loss is the mean of (log Z + log p(y_k) - log p_ref(y_k) - r_k / beta) squared, times beta / 2
    (docs/objectives.md; Bartoldson et al. 2025, arXiv 2503.18929).
    """
    lengths, mask_R = [len(row.response_ids) for row in rows], counted(rows)
    with torch.no_grad():
        reference_R = reference.score(rows).logprob_R.double()
    shape = (len(rows) // SAMPLES, SAMPLES)
    responses = Responses(
        logprob_R=scorer.score(rows).logprob_R,
        sampled_logprob_R=torch.from_numpy(np.concatenate([row.sampling_logprobs for row in rows])),
        mask_R=mask_R,
        lengths=lengths,
        reward_bK=torch.tensor(rewards, dtype=torch.float64).view(shape),
        reference_bK=torch.stack([part.sum() for part in reference_R.split(lengths)]).view(shape),
        staleness_bK=torch.zeros(shape, dtype=torch.float64),
        totals=Totals(prompts=shape[0], rows=len(rows), tokens=int(mask_R.sum())),
    )
    return objective.loss(responses, BETA)


def publish(scorer: Scorer, folder: Path, version: int, sequence: list[int]) -> Snapshot:
    """Write a snapshot. Its canary has the trainer's log-probabilities of a sequence: the engine must find the same."""
    final = folder / directory_name(version)
    temporary = temporary_directory(final)
    scorer.model.save_pretrained(temporary)
    row = Row(0, np.asarray(sequence[:1]), np.asarray(sequence[1:]), np.zeros(0), np.ones(0), on_policy=True)
    with torch.no_grad():
        canary = Canary([sequence], [scorer.score([row]).logprob_R.tolist()])
    seal(temporary, final, Manifest("one page", version, version, 0.0, describe_files(temporary), canary))
    return read(final)


def main() -> None:
    """Train for some steps, and print rewards and the accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampler, cpu = Sampler(options.seed), torch.device("cpu")
    scorer, reference = (Scorer(load_model(MODEL, cpu), autocast=False) for _ in range(2))
    objective = make_objective(ObjectiveSection(name="tb"), longest_response=MAX_TOKENS)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    print(f"held-out greedy accuracy: {sampler.accuracy():.1%}")
    prompts = list(sampler.task.prompts())
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, options.steps + 1):
            chosen = [prompts[n % len(prompts)] for n in range((step - 1) * PROMPTS, step * PROMPTS)]
            rows, rewards = sampler.rows(chosen, SAMPLES, temperature=1.0)
            loss = loss_of(scorer, reference, objective, rows, rewards)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            sequence = [*rows[0].prompt_ids.tolist(), *rows[0].response_ids.tolist()]
            sampler.engine.load_weights(publish(scorer, Path(folder), step, sequence))
            if step % 10 == 0:
                print(f"step {step}: reward {np.mean(rewards):.3f}, loss {loss.item():.4f}")
    print(f"held-out greedy accuracy: {sampler.accuracy():.1%}")


if __name__ == "__main__":
    main()
