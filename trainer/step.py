"""One optimiser step: a batch in, metrics out.

Shape suffixes: B prompts of the batch, K samples of each, b prompts of a micro-batch, R response tokens.

The groups of a prompt stay whole, and each micro-batch gives its share of the batch's loss: shares add up to the
same loss and gradient however the batch is cut, and however it is divided over ranks. Every rank makes every step;
what it returns or raises is the same on all of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.common.config import ReferenceSection, TrainSection
from tba.common.errors import TbaError
from tba.trainer.adapters import has_adapters
from tba.trainer.batch import Row, TrainBatch, counted
from tba.trainer.log_z import LogZHead
from tba.trainer.model import Scorer, Scores, sequence_logprobs
from tba.trainer.objectives.choose import Objective
from tba.trainer.objectives.health import balance_metrics, off_policy_metrics
from tba.trainer.objectives.responses import Responses, Totals
from tba.trainer.ranks import ALONE, Ranks
from tba.trainer.reference import Reference
from tba.trainer.schedule import beta_at, learning_rate_schedule
from tba.trainer.sharding import fits_whole, keep_whole, shard, whole
from tba.trainer.shares import Turn, turns_of

_NAMED_IDS = 20  # trajectory ids that an error message lists


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `reference` are reference log-probabilities that were not stored, by trajectory id."""

    metrics: dict[str, float]
    reference: dict[int, float]


@dataclass(slots=True)
class _Sums:
    """What micro-batches leave behind."""

    policy_BK: Tensor
    sampled_BK: Tensor
    loss: float = 0.0
    differences: list[Tensor] = field(default_factory=list)  # |trainer - sampler| of on-policy tokens


class Learner:
    """The policy, its reference, the objective and the optimiser. `steps_done` counts updates.

    `reference` may be None with adapters, whose reference is the policy without them, and for an objective that
    needs none.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        config: TrainSection,
        objective: Objective,
        *,
        autocast: bool,
        ranks: Ranks = ALONE,
        reference_config: ReferenceSection | None = None,
    ) -> None:
        assert reference is not None or has_adapters(policy) or not objective.needs_reference
        self.policy = policy
        self.steps_done = 0
        self.adapter: dict[str, Any] | None = None  # what a checkpoint of adapters has to agree with
        self.log_z = LogZHead(policy.get_input_embeddings().embedding_dim) if objective.learns_log_z else None
        self._config = config
        self._objective = objective
        self._ranks = ranks
        self._scorer = Scorer(policy, autocast=autocast)
        scorer = self._scorer if reference is None else Scorer(reference.requires_grad_(False), autocast=autocast)
        self.reference = Reference(scorer, reference_config or ReferenceSection())
        self._just_computed: tuple[str, dict[int, float]] = ("", {})  # of the step before: reference, log-probabilities
        self._learning_rate = learning_rate_schedule(config)
        if config.gradient_checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": False})
            policy.train()
        if ranks.size > 1:
            for scorer in {self._scorer, self.reference.scorer}:
                shard(scorer, ranks, autocast=autocast)
        self._keeps_whole = ranks.size > 1 and fits_whole(config.sharding, policy, autocast=autocast)
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in policy.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            fused=policy.device.type == "cuda",
        )
        if self.log_z is not None:
            # It starts from nothing: a rate and a clip of its own, so that it does not take the policy's share.
            self.log_z.to(policy.device)
            self.optimizer.add_param_group(
                {"params": list(self.log_z.parameters()), "lr": objective.log_z_learning_rate, "weight_decay": 0.0}
            )

    def step(self, batch: TrainBatch, between: Callable[[], None] = lambda: None) -> StepResult:
        """Make one update. `between` is called after each micro-batch.

        Raises TbaError, with the weights as they were, if a loss or a gradient is not finite.
        """
        self._check_tokens(batch)
        stored_BK, computed = self._complete_reference(batch, between)
        beta = beta_at(self._config, self.steps_done)
        learning_rate = self._learning_rate(self.steps_done)
        sums = self.accumulate(batch, stored_BK, beta, between)
        grad_norm = float(whole(nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm)))
        if self.log_z is not None:
            nn.utils.clip_grad_norm_(self.log_z.parameters(), self._config.max_grad_norm)
        self._check_finite(batch, sums, grad_norm)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        self.reference.follow(self.policy, self.steps_done)
        metrics = {
            "loss": sums.loss,
            **balance_metrics(sums.policy_BK, stored_BK, batch.reward_BK, beta),
            **off_policy_metrics(sums.policy_BK, sums.sampled_BK),
            **_batch_metrics(batch),
            **_mismatch_metrics(sums.differences),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "beta": beta,
            "reference_computed": float(len(computed)),
        }
        return StepResult(metrics, computed)

    def accumulate(
        self, batch: TrainBatch, reference_BK: Tensor, beta: float, between: Callable[[], None] = lambda: None
    ) -> _Sums:
        """Forward and backward of the whole batch; gradients are in the parameters afterwards."""
        samples = batch.samples
        sums = _Sums(torch.zeros_like(batch.reward_BK), torch.zeros_like(batch.reward_BK))
        groups = [range(b * samples, (b + 1) * samples) for b in range(batch.prompts)]
        turns = self._turns(groups, batch.rows)
        for turn in turns:
            if self._keeps_whole:
                keep_whole(self._scorer, last=turn is turns[-1])
            rows = [batch.rows[row] for b in turn.groups for row in groups[b]]
            scores = self._scorer.score(rows, pooled=self._objective.learns_log_z, passes=turn.passes)
            if rows:
                self._add_share(batch, turn.groups, rows, scores, reference_BK, beta, sums)
            else:
                torch.autograd.backward(scores.logprob_R.sum())  # no numbers; only what the other ranks wait for
            between()
        return self._over_ranks(sums)

    def _add_share(
        self,
        batch: TrainBatch,
        part: list[int],
        rows: list[Row],
        scores: Scores,
        reference_BK: Tensor,
        beta: float,
        sums: _Sums,
    ) -> None:
        """Backward of some groups of the batch."""
        responses = self._responses(batch, part, rows, scores, reference_BK)
        loss = self._objective.loss(responses, beta)
        torch.autograd.backward(loss)
        sums.loss += loss.item()
        sums.policy_BK[part] = responses.policy_bK.detach()
        sums.sampled_BK[part] = responses.sampled_bK
        sums.differences += _on_policy_differences(rows, responses.logprob_R.detach())

    def _turns(self, groups: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[Turn]:
        return turns_of(
            groups,
            [row.tokens for row in rows],
            limit=self._config.micro_batch_tokens,
            overhead=self._scorer.overhead,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
        )

    def _over_ranks(self, sums: _Sums) -> _Sums:
        """The sums of all ranks. FSDP has added up the policy's gradients; here go those that it does not know."""
        if self._ranks.size == 1:
            return sums
        if self.log_z is not None:
            for parameter in self.log_z.parameters():
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._ranks.sum(mine)
        differences = torch.cat([torch.zeros(0), *sums.differences])
        return _Sums(
            policy_BK=self._ranks.sum(sums.policy_BK),
            sampled_BK=self._ranks.sum(sums.sampled_BK),
            loss=float(self._ranks.sum(torch.tensor(sums.loss, dtype=torch.float64))),
            differences=[self._ranks.concat(differences)],
        )

    def _responses(
        self, batch: TrainBatch, part: list[int], rows: list[Row], scores: Scores, reference_BK: Tensor
    ) -> Responses:
        """Some groups of the batch as the objective sees them."""
        log_z_b = None
        if self.log_z is not None and scores.prompt_NH is not None:
            # The rows of a group have the same prompt, and nothing in a prompt sees the response after it.
            log_z_b = self.log_z(scores.prompt_NH[:: batch.samples])
        return Responses(
            logprob_R=scores.logprob_R.cpu(),
            sampled_logprob_R=torch.from_numpy(np.concatenate([row.sampling_logprobs for row in rows])),
            mask_R=counted(rows),
            lengths=[len(row.response_ids) for row in rows],
            reward_bK=batch.reward_BK[part],
            reference_bK=reference_BK[part],
            lag_bK=batch.staleness_BK[part],
            totals=_totals(batch),
            log_z_b=log_z_b,
        )

    @torch.no_grad()
    def _complete_reference(self, batch: TrainBatch, between: Callable[[], None]) -> tuple[Tensor, dict[int, float]]:
        """Reference log-probabilities of the batch, and those of them that had to be computed.

        None are where the objective has no use for them: what is not stored stays NaN.
        A trajectory that stands in the batch twice is computed once: its copies could differ in the last
        bit, and after a resume both would have the stored one. For the same reason what the step before computed
        is taken from there: the batch may have been asked for before it was stored.
        """
        name, earlier = self._just_computed
        own = self.reference.name_at(self.steps_done)
        earlier = earlier if name == own else {}
        known = {
            row.id: earlier.get(row.id, stored) if math.isnan(stored) else stored
            for row, stored in zip(batch.rows, batch.reference_BK.flatten().tolist(), strict=True)
        }
        needed = batch.rows if self._objective.needs_reference else []
        missing = {row.id: row for row in needed if math.isnan(known[row.id])}
        unknown = list(missing.values())
        sequence_N = torch.zeros(len(unknown), dtype=torch.float64)
        for turn in self._turns([[index] for index in range(len(unknown))], unknown):
            rows = [unknown[index] for index in turn.groups]
            logprob_R = self.reference.score(rows, passes=turn.passes).logprob_R
            if rows:
                sequence_N[turn.groups] = sequence_logprobs(logprob_R, rows).cpu()
            between()
        computed = dict(zip(missing, self._ranks.sum(sequence_N).tolist(), strict=True))
        if broken := [id_ for id_, logprob in computed.items() if not math.isfinite(logprob)]:
            raise TbaError(f"step {batch.step}: the reference log-probability is not finite for {_ids(broken)}")
        known |= computed
        self._just_computed = (own, computed)
        reference = torch.tensor([known[row.id] for row in batch.rows], dtype=torch.float64)
        return reference.view_as(batch.reward_BK), computed

    def _check_tokens(self, batch: TrainBatch) -> None:
        """An id outside the vocabulary would be an unreadable device error, or a silent wrong row."""
        for row in batch.rows:
            for tokens in (row.prompt_ids, row.response_ids):
                if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._scorer.vocabulary):
                    raise TbaError(
                        f"trajectory {row.id} has token ids outside the model's vocabulary of "
                        f"{self._scorer.vocabulary}: searchers and trainer must use the same model"
                    )

    def _check_finite(self, batch: TrainBatch, sums: _Sums, grad_norm: float) -> None:
        if math.isfinite(sums.loss) and math.isfinite(grad_norm):
            return
        self.optimizer.zero_grad()
        finite = sums.policy_BK.flatten().isfinite().tolist()
        broken = [row.id for row, good in zip(batch.rows, finite, strict=True) if not good]
        raise TbaError(
            f"step {batch.step}: loss {sums.loss}, gradient norm {grad_norm}; no update was made. "
            f"Not finite: {_ids(broken or [row.id for row in batch.rows])}"
        )


def _totals(batch: TrainBatch) -> Totals:
    """What objectives divide by."""
    counted = sum(int(np.count_nonzero(row.loss_mask)) for row in batch.rows)
    return Totals(prompts=batch.prompts, rows=len(batch.rows), tokens=counted)


def _ids(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _NAMED_IDS} more" if len(ids) > _NAMED_IDS else ""
    return f"trajectories {', '.join(map(str, ids[:_NAMED_IDS]))}{more}"


def _batch_metrics(batch: TrainBatch) -> dict[str, float]:
    lengths = [len(row.response_ids) for row in batch.rows]
    return {
        "reward_mean": float(batch.reward_BK.mean()),
        "reward_std": float(batch.reward_BK.std(correction=0)),
        "staleness_mean": float(batch.staleness_BK.mean()),
        "staleness_max": float(batch.staleness_BK.max()),
        "tokens": float(sum(row.tokens for row in batch.rows)),
        "response_tokens_mean": sum(lengths) / len(lengths),
    }


def _on_policy_differences(rows: Sequence[Row], logprob_R: Tensor) -> list[Tensor]:
    """|trainer's - sampler's log-probability| per token, where both are of the same weights at temperature 1."""
    lengths = [len(row.response_ids) for row in rows]
    return [
        (logprobs - torch.from_numpy(row.sampling_logprobs.copy())).abs()[torch.from_numpy(row.loss_mask != 0)]
        for row, logprobs in zip(rows, torch.split(logprob_R, lengths), strict=True)
        if row.on_policy
    ]


def _mismatch_metrics(differences: Sequence[Tensor]) -> dict[str, float]:
    """The trainer-engine mismatch; nothing if no token was sampled from the present weights."""
    flat = torch.cat(list(differences)) if differences else torch.zeros(0)
    if not len(flat):
        return {}
    return {"mismatch_mean": float(flat.mean()), "mismatch_max": float(flat.max())}
