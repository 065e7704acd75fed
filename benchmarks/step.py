"""Loss and gradient of one batch: tba against TRL, the authors' code, and a bare forward and backward pass.

    python -m benchmarks.step [--threads 2] [--rounds 3]

All have the same weights and trajectories and alternate in one process on the CPU, after a warm-up round. Response
lengths are log-normal with mean 200 and at most 1,024 tokens, prompts have 40 to 120 tokens.

- bare: the minimum: rows of similar length padded, a causal forward, cross-entropy of the logits at response
  positions, backward, pass by pass. No objective, no groups.
- tba: `Learner`, from rows to gradients, with the entropy that it measures by default: rows packed into one, in which
  the rows of a group share their prompt.
- quiet: tba without the entropy.
- padded: tba with `train.packing = "padded"`: rows of similar length padded, each with its prompt.
- TRL: `GRPOTrainer._compute_loss` and backward on micro-batches of 8 rows, its default, all rows padded to the longest
  prompt and the longest completion of the batch, as its data preparation leaves them.
- paper: as in TBA's released trainer, all K rows of a prompt padded to one length, logits of the whole rectangle,
  log-softmax, one backward pass per prompt.

Memory is measured separately, at two sizes of vocabulary, on one prompt with four responses: the peak resident set of
a new process during the step, minus what is resident before it with gradients allocated. Embedding and head are frozen
there, so that their gradients, [vocabulary x hidden] in all cases, do not count as activations.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bare import logprobs
from benchmarks.harness import Seconds, in_turns, print_table, timed
from tba.common.config import ObjectiveSection, TrainSection
from tba.tests.helpers.trainer import learner_of
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.batch.micro_batches import forward_passes
from tba.trainer.objectives.advantages import standardised
from tba.trainer.objectives.from_config import make_objective

LONGEST, PAD = 1024, 0
VOCABULARIES = (32_000, 152_000)


def make_model(vocabulary: int) -> LlamaForCausalLM:
    """Return a model with about 23 M parameters in its layers, and a tied embedding."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(shape)


def make_batch(prompts: int, samples: int, vocabulary: int, mean: int = 200) -> TrainBatch:
    """Return a batch whose lengths vary like those of a reasoning model."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(prompts):
        prompt = rng.integers(1, vocabulary, size=rng.integers(40, 121)).astype(np.int32)
        for _ in range(samples):
            length = int(np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8), min(mean, 8), LONGEST))
            rows.append(
                Row(
                    id=len(rows),
                    prompt_ids=prompt,
                    response_ids=rng.integers(1, vocabulary, size=length).astype(np.int32),
                    sampling_logprobs=np.full(length, -10.0, np.float32),
                    loss_mask=np.ones(length, np.uint8),
                    on_policy=False,
                )
            )
    shape = (prompts, samples)
    return TrainBatch(
        step=0,
        rows=rows,
        reward_BK=torch.from_numpy(rng.random(shape)),
        reference_BK=torch.full(shape, -2000.0, dtype=torch.float64),
        staleness_BK=torch.ones(shape, dtype=torch.float64),
    )


def tba_way(
    model: LlamaForCausalLM, batch: TrainBatch, *, packed: bool = True, entropy: bool = True
) -> Callable[[], object]:
    # The batch includes reference log-probabilities, so no reference model is needed.
    objective = replace(make_objective(ObjectiveSection(), longest_response=LONGEST), needs_reference=False)
    config = TrainSection(micro_batch_tokens=16384)
    learner = learner_of(model, None, config, objective, packed=packed, entropy=entropy)
    return lambda: learner.accumulate(batch, batch.reference_BK, 0.01)


def bare_way(model: LlamaForCausalLM, batch: TrainBatch) -> Callable[[], None]:
    passes = forward_passes([row.tokens for row in batch.rows], overhead=64)

    def run() -> None:
        for members in passes:
            torch.autograd.backward(-logprobs(model, [batch.rows[n] for n in members]).sum())

    return run


def trl_way(model: LlamaForCausalLM, batch: TrainBatch) -> Callable[[], None]:
    import datasets
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"pad": 0, "a": 1}, unk_token="a"))
    samples = batch.samples
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], bf16=False, num_generations=samples,
            per_device_train_batch_size=8, max_completion_length=LONGEST, gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="pad"),
    )  # fmt: skip
    rows = batch.rows
    inputs = {
        "prompt_ids": padded([row.prompt_ids for row in rows], "left"),
        "prompt_mask": padded([np.ones_like(row.prompt_ids) for row in rows], "left"),
        "completion_ids": padded([row.response_ids for row in rows], "right"),
        "completion_mask": padded([np.ones_like(row.response_ids) for row in rows], "right"),
        "old_per_token_logps": padded([row.sampling_logprobs for row in rows], "right").float(),
        "advantages": standardised(batch.reward_BK).flatten().float(),
    }
    trainer.current_gradient_accumulation_steps = max(len(rows) // 8, 1)
    total = torch.tensor(sum(len(row.response_ids) for row in rows))
    model.train()

    def run() -> None:
        for start in range(0, len(rows), 8):
            part = {name: value[start : start + 8] for name, value in inputs.items()}
            torch.autograd.backward(trainer._compute_loss(model, part | {"num_items_in_batch": total}))

    return run


def paper_way(model: LlamaForCausalLM, batch: TrainBatch) -> Callable[[], None]:
    beta, samples = 0.01, batch.samples

    def run() -> None:
        for b in range(batch.prompts):
            rows = batch.rows[b * samples : (b + 1) * samples]
            ids = padded([np.concatenate([row.prompt_ids, row.response_ids]) for row in rows], "right")
            mask = padded([np.ones(row.tokens, np.int64) for row in rows], "right")
            answer = padded([np.arange(row.tokens) >= len(row.prompt_ids) for row in rows], "right")
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            policy = (chosen * answer[:, 1:]).sum(1)
            gap = policy - batch.reference_BK[b].float() - batch.reward_BK[b].float() / beta
            torch.autograd.backward((gap - gap.mean().detach()).square().mean() / batch.prompts)

    return run


def padded(rows: list[np.ndarray], side: str) -> Tensor:
    tensors = [torch.from_numpy(np.asarray(row)) for row in rows]
    whole = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD, padding_side=side)
    return whole if whole.is_floating_point() else whole.long()


WAYS: dict[str, Callable[[LlamaForCausalLM, TrainBatch], Callable[[], object]]] = {
    "bare": bare_way,
    "tba": tba_way,
    "quiet": partial(tba_way, entropy=False),
    "padded": partial(tba_way, packed=False),
    "TRL": trl_way,
    "paper": paper_way,
}


def prepare(way: str, options: argparse.Namespace) -> tuple[LlamaForCausalLM, Callable[[], object]]:
    """Return a model, and a function that adds the gradient of the whole batch to its parameters."""
    model = make_model(options.vocabulary)
    batch = make_batch(options.prompts, options.samples, options.vocabulary, options.mean)
    return model, WAYS[way](model, batch)


def resident_mib(field: str) -> float:
    """Return VmRSS, or its peak VmHWM. getrusage would return the parent's peak if that is larger."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def activations_mib(way: str, options: argparse.Namespace) -> float:
    """Return the peak of one step above what is resident before it."""
    model, run = prepare(way, options)
    model.get_input_embeddings().requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    # Resets the peak.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident_mib("VmRSS")
    run()
    return resident_mib("VmHWM") - before


def in_child(way: str, vocabulary: int, options: argparse.Namespace) -> float:
    """Run `activations_mib` in a new process."""
    settings = ["--prompts", 1, "--samples", 4, "--vocabulary", vocabulary, "--threads", options.threads]
    command = [sys.executable, "-m", "benchmarks.step", "--peak", way, *map(str, settings)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(result.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mean", type=int, default=200, help="mean length of the responses")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--only", choices=("time", "memory"))
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(json.dumps(activations_mib(options.peak, options)))
        return
    if options.only != "memory":
        report_time(options)
    if options.only != "time":
        report_memory(options)


def report_time(options: argparse.Namespace) -> None:
    """Print medians over rounds. CPU seconds are those of all threads."""
    prepared = {way: prepare(way, options) for way in options.ways}
    # Warm-up: page faults of the first round take up to half as long as the rest of it.
    for _, run in prepared.values():
        run()

    def measured(model: LlamaForCausalLM, run: Callable[[], object]) -> Seconds:
        model.zero_grad()
        return timed(run)[0]

    seconds = in_turns({way: partial(measured, *of_way) for way, of_way in prepared.items()}, options.rounds)
    rows = make_batch(options.prompts, options.samples, options.vocabulary, options.mean).rows
    medians = {way: np.median(values, axis=0) for way, values in seconds.items()}
    name = options.ways[0]
    lines = [
        (way, *(f"{value:.2f}" for pair in zip(median, median / medians[name], strict=True) for value in pair))
        for way, median in medians.items()
    ]
    tokens = sum(row.tokens for row in rows)
    title = f"loss and gradient of {len(rows)} rows, {tokens:,} tokens, vocabulary {options.vocabulary:,}"
    print_table(title, ["way", "seconds", f"x {name}", "CPU seconds", f"x {name}"], lines)


def report_memory(options: argparse.Namespace) -> None:
    rows = [(way, *(f"{in_child(way, size, options):,.0f}" for size in VOCABULARIES)) for way in options.ways]
    tokens = sum(row.tokens for row in make_batch(1, 4, VOCABULARIES[0]).rows)
    headings = ["way", *(f"MiB at {size:,}" for size in VOCABULARIES)]
    print_table(f"peak activation memory, 4 rows, {tokens:,} tokens, embedding and head frozen", headings, rows)


if __name__ == "__main__":
    main()
