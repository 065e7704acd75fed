"""Supervised fine-tuning: the warm start that reinforcement learning needs.

The step is the trainer's own (`Learner`), with the likelihood as its objective and a batch of one response for each
prompt. The order of the rows is a function of seed and step, so a resume needs nothing but the checkpoint.

Beside the directory of the model, `OUT`, there is `OUT.work` while it is being made: lock, metrics and checkpoints. The
model appears at once and complete.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tba.common.clock import Clock, SystemClock
from tba.common.config import Config
from tba.common.durable import exclusive_lock, publish_directory, temporary_directory
from tba.common.errors import CheckpointError, ConfigError, TrainingBroken, UsageError
from tba.common.log import get_logger
from tba.common.model_files import eos_ids, model_directory, share_weights
from tba.trainer import checkpoint
from tba.trainer.batch import Row, TrainBatch, cut
from tba.trainer.loop import prepare
from tba.trainer.metrics import MetricsLog
from tba.trainer.model import load_model
from tba.trainer.objectives.choose import Objective
from tba.trainer.objectives.likelihood import negative_log_likelihood
from tba.trainer.sft_data import Encoder, read_rows
from tba.trainer.step import Learner

log = get_logger(__name__)

_METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train on, how long (`steps`, or else `epochs`), and where to. A batch has `batch_size` rows."""

    data: Sequence[Path]
    out: Path
    held_out: Path | None = None
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 64

    @property
    def work(self) -> Path:
        """Where unfinished work is."""
        return self.out.with_name(f"{self.out.name}.work")


def sft(
    config: Config,
    plan: Plan,
    *,
    resume: bool,
    device: str,
    stop: Callable[[], bool],
    tell: Callable[[dict[str, float]], None],
    clock: Clock | None = None,
) -> bool:
    """Make the model in `plan.out`. False if `stop()` came first: then there is a checkpoint to go on from.

    `tell` hears of every step. Of the configuration, `model`, `run.seed` and the optimiser's part of `train` apply.
    """
    if plan.out.exists():
        raise UsageError(f"{plan.out} exists already: name another --out")
    with exclusive_lock(plan.work / "trainer.lock", f"another process makes {plan.out}: stop it first"):
        prepare(config, device)
        job = Job(config, plan, resume=resume, device=torch.device(device), clock=clock or SystemClock())
        try:
            finished = job.run(stop, tell)
        finally:
            job.close()
        if finished:
            job.publish()
            shutil.rmtree(plan.work)
    return finished


class Job:
    """One start of the training."""

    def __init__(self, config: Config, plan: Plan, *, resume: bool, device: torch.device, clock: Clock) -> None:
        files = model_directory(config.model.path)
        self._plan, self._clock = plan, clock
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(files)
        policy = load_model(files, device)
        encoder = _encoder(files, self._tokenizer, policy)
        self._rows = read_rows(plan.data, encoder)
        self._held_out = read_rows([plan.held_out], encoder) if plan.held_out else []
        self._name = _fingerprint(self._rows, config.run.seed, plan.batch_size)
        found = _find_checkpoint(plan.work, self._name, resume=resume)
        self._seed = config.run.seed
        self._dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        autocast = device.type == "cuda" and config.model.dtype == "bfloat16"
        self.steps = plan.steps or math.ceil(plan.epochs * len(self._rows) / plan.batch_size)
        self._train = config.train.model_copy(update={"steps": self.steps})
        objective = Objective("likelihood", lambda responses, _: negative_log_likelihood(responses), False)
        self.learner = Learner(policy, None, self._train, objective, autocast=autocast)
        if found is not None:
            checkpoint.restore(found, self.learner)
            log.info("resumed", checkpoint=found.path, step=found.step)
        self._saved_step = self.learner.steps_done
        self._metrics = MetricsLog(plan.work, first_step=self.learner.steps_done)

    def run(self, stop: Callable[[], bool], tell: Callable[[dict[str, float]], None]) -> bool:
        """Train to the last step; False if `stop()` came first."""
        while self.learner.steps_done < self.steps and not stop():
            tell(self._step())
            if self.learner.steps_done % self._train.checkpoint_every == 0:
                self._save()
        self._save()
        return self.learner.steps_done >= self.steps

    def close(self) -> None:
        """Close the file of the metrics."""
        self._metrics.close()

    def publish(self) -> None:
        """The model under its name, in the type of `model.dtype`, with the metrics of its training."""
        temporary = temporary_directory(self._plan.out)
        try:
            self.learner.policy.to(self._dtype).save_pretrained(temporary)
            self._tokenizer.save_pretrained(temporary)
            share_weights(temporary)
            shutil.copyfile(self._plan.work / _METRICS, temporary / f"sft_{_METRICS}")
            publish_directory(temporary, self._plan.out)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"{self._plan.out} cannot be written: {error}; --resume goes on from there"
            ) from error
        log.info("model saved", path=self._plan.out)

    def _step(self) -> dict[str, float]:
        """One update; the record of it has the held-out loss after it where that is due."""
        started = self._clock.monotonic()
        step = self.learner.steps_done
        measured = {"held_out_loss_before": self._held_out_loss()} if step == 0 and self._held_out else {}
        made = self.learner.step(_batch(self.rows_of(step), step))
        if made.skipped:
            raise TrainingBroken(
                f"step {step} was not made, {made.skipped} (rows are counted from 0): --resume goes on from the newest "
                "checkpoint, a smaller train.learning_rate may help"
            )
        result = made.metrics
        seconds = self._clock.monotonic() - started
        done = self.learner.steps_done
        if self._held_out and (done == self.steps or done % self._train.checkpoint_every == 0):
            measured["held_out_loss"] = self._held_out_loss()
        kept = {name: result[name] for name in ("loss", "grad_norm", "learning_rate", "tokens")}
        speed = {"tokens_per_second": result["tokens"] / max(seconds, 1e-9)}
        self._metrics.record(step, self._clock.wall(), kept | speed | measured)
        return {"step": done, "steps": self.steps, **kept, **speed, **measured}

    def rows_of(self, step: int) -> list[Row]:
        """Epoch after epoch in a shuffled order each; a batch may begin in one and end in the next."""
        rows, size = len(self._rows), self._plan.batch_size
        last = math.inf if self._plan.steps else self._plan.epochs * rows
        positions = [at for at in range(step * size, (step + 1) * size) if at < last]
        orders = {epoch: _order(self._seed, epoch, rows) for epoch in {at // rows for at in positions}}
        return [self._rows[orders[at // rows][at % rows]] for at in positions]

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        """Nats per token."""
        groups = [[index] for index in range(len(self._held_out))]
        total = 0.0
        for part in cut(groups, lambda row: self._held_out[row].tokens, self._train.micro_batch_tokens):
            total -= float(
                self.learner.scorer.score([self._held_out[index] for index in part]).logprob_R.double().sum()
            )
        return total / sum(len(row.response_ids) for row in self._held_out)

    def _save(self) -> None:
        if self.learner.steps_done == self._saved_step:
            return
        self._metrics.sync()
        keep = self._train.keep_checkpoints
        checkpoint.save(self._plan.work / "checkpoints", self.learner, run=self._name, keep=keep)
        self._saved_step = self.learner.steps_done


def _encoder(files: Path, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> Encoder:
    ends = eos_ids(files) or ([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])
    if not ends:
        raise ConfigError(f"{files} names no end token: set eos_token_id in its config.json")
    vocabulary = policy.get_input_embeddings().num_embeddings
    return Encoder(tokenizer, ends, vocabulary, getattr(policy.config, "max_position_embeddings", None) or 1 << 30)


def _order(seed: int, epoch: int, rows: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
    return order


def _batch(rows: list[Row], step: int) -> TrainBatch:
    """Groups of one. Rewards and references have no part in the likelihood."""
    zero_B1: Tensor = torch.zeros(len(rows), 1, dtype=torch.float64)
    return TrainBatch(step, rows, zero_B1, torch.full_like(zero_B1, math.nan), zero_B1)


def _fingerprint(rows: Sequence[Row], seed: int, batch_size: int) -> str:
    """What decides which rows a step trains on: a resume with other data would be another run."""
    digest = hashlib.sha256(repr((seed, batch_size)).encode())
    for row in rows:
        for tokens in (row.prompt_ids, row.response_ids):
            digest.update(len(tokens).to_bytes(4, "little") + tokens.tobytes())
    return f"sft-{digest.hexdigest()[:16]}"


def _find_checkpoint(work: Path, name: str, *, resume: bool) -> checkpoint.Checkpoint | None:
    directory = work / "checkpoints"
    if not resume:
        if existing := checkpoint.list_checkpoints(directory):
            raise UsageError(f"{existing[-1]} is of an earlier start: pass --resume to go on from it, or delete {work}")
        return None
    found = checkpoint.newest(directory)
    if found is not None and found.run != name:
        raise UsageError(f"{found.path} is of other data, another seed or another --batch-size: name another --out")
    return found
