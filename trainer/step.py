"""One optimiser step: a batch in, metrics out.

Shape suffixes: B prompts of the batch, K samples of each, b prompts of a micro-batch, R response tokens.

The groups of a prompt stay whole, and each micro-batch gives its share of the batch's loss: shares add up to the
same loss and gradient however the batch is cut, and however it is divided over ranks. Every rank makes every step;
what it returns or raises is the same on all of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.common.clock import SystemClock
from tba.common.config import ReferenceSection, TrainSection
from tba.common.errors import TbaError
from tba.trainer.adapters import has_adapters
from tba.trainer.batch import Row, TrainBatch, counted
from tba.trainer.log_z import LogZHead
from tba.trainer.model import Scorer, Scores, sequence_logprobs
from tba.trainer.objectives.choose import Objective
from tba.trainer.objectives.health import (
    balance_metrics,
    mismatch_metrics,
    off_policy_metrics,
    truncated_fraction,
)
from tba.trainer.objectives.responses import Responses, Totals
from tba.trainer.packing import packs
from tba.trainer.pieces import backward_piece, score_pieces
from tba.trainer.ranks import ALONE, Ranks
from tba.trainer.reference import Reference
from tba.trainer.schedule import beta_at, learning_rate_schedule
from tba.trainer.sharding import fits_whole, keep_whole, shard, whole
from tba.trainer.shares import Piece, Turn, turns_of
from tba.trainer.step_metrics import batch_metrics, on_policy_differences, only_finite
from tba.trainer.stopwatch import Stopwatch

_NAMED_IDS = 20  # trajectory ids that an error message lists


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `reference` are reference log-probabilities that were not stored, by trajectory id.

    `skipped` says why no update was made, and `blamed` are the trajectories of it; they are empty after an update.
    """

    metrics: dict[str, float]
    reference: dict[int, float]
    skipped: str = ""
    blamed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sums:
    """What micro-batches leave behind."""

    policy_BK: Tensor
    sampled_BK: Tensor
    loss: float = 0.0
    differences: list[Tensor] = field(default_factory=list)  # trainer - engine, of on-policy tokens
    log_ratios: list[Tensor] = field(default_factory=list)  # log pi - log mu of counted tokens
    entropies: list[Tensor] = field(default_factory=list)  # of counted tokens, if they are measured


class Learner:
    """The policy, its reference, the objective and the optimiser.

    `steps_done` counts updates, the skipped ones included. `scorer` is of the policy, `watch` has the time of each
    phase. `reference` may be None with adapters, whose reference is the policy without them, and for an objective that
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
        lineage: str = "",
        entropy: bool = False,
    ) -> None:
        assert reference is not None or has_adapters(policy) or not objective.needs_reference
        self.policy = policy
        self.watch = Stopwatch(SystemClock())
        self.before_writing: Callable[[], None] = lambda: None  # called before weights change
        self.steps_done = 0
        self.adapter: dict[str, Any] | None = None  # what a checkpoint of adapters has to agree with
        self.log_z = LogZHead(policy.get_input_embeddings().embedding_dim) if objective.learns_log_z else None
        self._config = config
        self._objective = objective
        self._ranks = ranks
        self._entropy = entropy
        device = policy.device.type if ranks.mesh is None else ranks.mesh.device_type
        packed = packs(config.packing, policy, device, half=autocast)
        self.scorer = scorer = Scorer(policy, autocast=autocast, packed=packed)
        if reference is not None:
            scorer = Scorer(reference.requires_grad_(False), autocast=autocast, packed=packed)
        self.reference = Reference(scorer, reference_config or ReferenceSection(), lineage)
        self._just_computed: tuple[str, dict[int, float]] = ("", {})  # of the step before: reference, log-probabilities
        self._learning_rate = learning_rate_schedule(config)
        if config.gradient_checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": False})
            policy.train()
        if ranks.size > 1:
            for scorer in dict.fromkeys((self.scorer, self.reference.scorer)):
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

    def step(self, batch: TrainBatch) -> StepResult:
        """Make one update.

        If a loss, a gradient or a reference log-probability is not finite the step is skipped: it counts, and weights
        and optimiser stay what they were.
        """
        self._check_tokens(batch)
        with self.watch.phase("reference"):
            reference_BK, computed = self._complete_reference(batch)
        finite = {id_: logprob for id_, logprob in computed.items() if math.isfinite(logprob)}
        if len(finite) < len(computed):
            blamed = sorted(computed.keys() - finite.keys())
            return self._skip(batch, finite, "a reference log-probability is not finite", blamed)
        beta = beta_at(self._config, self.steps_done)
        sums = self.accumulate(batch, reference_BK, beta)
        with self.watch.phase("optimizer"):
            norms = self._clip_gradients()
            if not all(map(math.isfinite, (sums.loss, *norms))):
                reason = f"loss {sums.loss}, gradient norm {max(norms, key=_worst)}"
                return self._skip(batch, finite, reason, _not_finite(batch, sums))
            learning_rate = self._update()
        metrics = {
            "loss": sums.loss,
            **balance_metrics(sums.policy_BK, reference_BK, batch.reward_BK, beta),
            **self._policy_metrics(sums),
            **batch_metrics(batch),
            "grad_norm": norms[0],
            "grad_clipped": float(norms[0] > self._config.max_grad_norm),
            "learning_rate": learning_rate,
            "beta": beta,
            "reference_computed": float(len(computed)),
            "skipped": 0.0,
        }
        return StepResult(only_finite(metrics), computed)

    def _clip_gradients(self) -> list[float]:
        """The gradient norms before clipping: the policy's, and that of a learned log Z."""
        modules: list[nn.Module] = [self.policy] if self.log_z is None else [self.policy, self.log_z]
        limit = self._config.max_grad_norm
        return [float(whole(nn.utils.clip_grad_norm_(module.parameters(), limit))) for module in modules]

    def _update(self) -> float:
        """Let the optimiser use the gradients. Returns its learning rate."""
        learning_rate = self._learning_rate(self.steps_done)
        self.before_writing()
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        self.reference.follow(self.policy, self.steps_done)
        return learning_rate

    def _skip(self, batch: TrainBatch, reference: dict[int, float], reason: str, blamed: list[int]) -> StepResult:
        """Count a step without an update. Everything that follows is as if its learning rate had been zero."""
        self.before_writing()
        self.optimizer.zero_grad()
        self.steps_done += 1
        self.reference.follow(self.policy, self.steps_done)
        metrics = {**batch_metrics(batch), "reference_computed": float(len(reference)), "skipped": 1.0}
        return StepResult(only_finite(metrics), reference, f"{reason}: {_ids(blamed)}", blamed)

    def _policy_metrics(self, sums: _Sums) -> dict[str, float]:
        """What is read off the log-probabilities of the policy."""
        of_response = self._objective.ratio_of_response
        ratios = sums.policy_BK - sums.sampled_BK if of_response else torch.cat(sums.log_ratios)
        entropy = torch.cat(sums.entropies) if sums.entropies else torch.zeros(0)
        return {
            **off_policy_metrics(sums.policy_BK, sums.sampled_BK),
            **truncated_fraction(ratios, self._objective.ratio_bounds),
            **mismatch_metrics(sums.differences),
            **({"entropy": float(entropy.mean())} if len(entropy) else {}),
        }

    def accumulate(self, batch: TrainBatch, reference_BK: Tensor, beta: float) -> _Sums:
        """Forward and backward of the whole batch; gradients are in the parameters afterwards."""
        samples = batch.samples
        sums = _Sums(torch.zeros_like(batch.reward_BK), torch.zeros_like(batch.reward_BK))
        groups = [range(b * samples, (b + 1) * samples) for b in range(batch.prompts)]
        turns = self._turns(groups, batch.rows)
        for turn in turns:
            rows = [batch.rows[row] for b in turn.groups for row in groups[b]]
            share = functools.partial(self._add_share, batch, turn.groups, rows, reference_BK, beta, sums)
            if len(turn.pieces) == 1:
                self._at_once(rows, turn.pieces[0], share, last=turn is turns[-1])
            else:
                self._in_pieces(rows, turn.pieces, share, last=turn is turns[-1])
        return self._over_ranks(sums)

    def _at_once(self, rows: list[Row], piece: Piece, share: Callable[[Scores], None], *, last: bool) -> None:
        """Forward and backward of a micro-batch in one graph."""
        self._keep_whole(last=last)
        with self.watch.phase("forward"):
            scores = self.scorer.score(
                rows, pooled=self._objective.learns_log_z, entropy=self._entropy, passes=piece.passes
            )
        if rows:
            share(scores)
        else:
            torch.autograd.backward(scores.logprob_R.sum())  # no numbers; only what the other ranks wait for

    def _in_pieces(self, rows: list[Row], pieces: list[Piece], share: Callable[[Scores], None], *, last: bool) -> None:
        """Forward and backward of a micro-batch that is too large for one graph, on some rank at least."""
        self._keep_whole(last=False)
        with self.watch.phase("forward"):
            pooled, entropy = self._objective.learns_log_z, self._entropy
            scores = score_pieces(self.scorer, rows, pieces, pooled=pooled, entropy=entropy)
        if rows:
            share(scores)
        slope_R = torch.zeros_like(scores.logprob_R) if scores.logprob_R.grad is None else scores.logprob_R.grad
        for piece in pieces:
            self._keep_whole(last=last and piece is pieces[-1])
            with self.watch.phase("backward"):
                backward_piece(self.scorer, rows, piece, slope_R)

    def _keep_whole(self, *, last: bool) -> None:
        if self._keeps_whole:
            keep_whole(self.scorer, last=last)

    def _add_share(
        self,
        batch: TrainBatch,
        part: list[int],
        rows: list[Row],
        reference_BK: Tensor,
        beta: float,
        sums: _Sums,
        scores: Scores,
    ) -> None:
        """Backward of some groups of the batch, as far as their scores have a graph."""
        with self.watch.phase("forward"):
            responses = self._responses(batch, part, rows, scores, reference_BK)
            loss = self._objective.loss(responses, beta)
        with self.watch.phase("backward"):
            torch.autograd.backward(loss)
        sums.loss += loss.item()
        logprob_R, mask_R = responses.logprob_R.detach(), responses.mask_R
        sums.log_ratios.append((logprob_R - responses.sampled_logprob_R)[mask_R])
        if scores.entropy_R is not None:
            sums.entropies.append(scores.entropy_R.cpu()[mask_R])
        sums.policy_BK[part] = responses.policy_bK.detach()
        sums.sampled_BK[part] = responses.sampled_bK
        sums.differences += on_policy_differences(rows, logprob_R)

    def _turns(self, groups: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[Turn]:
        return turns_of(
            groups,
            [row.tokens for row in rows],
            limit=self._config.micro_batch_tokens,
            passes_of=self.scorer.passes_of,
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
        return _Sums(
            policy_BK=self._ranks.sum(sums.policy_BK),
            sampled_BK=self._ranks.sum(sums.sampled_BK),
            loss=float(self._ranks.sum(torch.tensor(sums.loss, dtype=torch.float64))),
            differences=self._joined(sums.differences),
            log_ratios=self._joined(sums.log_ratios),
            entropies=self._joined(sums.entropies) if self._entropy else [],
        )

    def _joined(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [self._ranks.concat(torch.cat([torch.zeros(0, dtype=torch.float64), *values]))]

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
    def _complete_reference(self, batch: TrainBatch) -> tuple[Tensor, dict[int, float]]:
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
            (piece,) = turn.pieces  # a row is never divided
            logprob_R = self.reference.score(rows, passes=piece.passes).logprob_R
            if rows:
                sequence_N[turn.groups] = sequence_logprobs(logprob_R, rows).cpu()
        computed = dict(zip(missing, self._ranks.sum(sequence_N).tolist(), strict=True))
        known |= computed
        self._just_computed = (own, {id_: logprob for id_, logprob in computed.items() if math.isfinite(logprob)})
        reference = torch.tensor([known[row.id] for row in batch.rows], dtype=torch.float64)
        return reference.view_as(batch.reward_BK), computed

    def _check_tokens(self, batch: TrainBatch) -> None:
        """An id outside the vocabulary would be an unreadable device error, or a silent wrong row."""
        for row in batch.rows:
            for tokens in (row.prompt_ids, row.response_ids):
                if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.scorer.vocabulary):
                    raise TbaError(
                        f"trajectory {row.id} has token ids outside the model's vocabulary of "
                        f"{self.scorer.vocabulary}: searchers and trainer must use the same model"
                    )


def _totals(batch: TrainBatch) -> Totals:
    """What objectives divide by."""
    counted = sum(int(np.count_nonzero(row.loss_mask)) for row in batch.rows)
    return Totals(prompts=batch.prompts, rows=len(batch.rows), tokens=counted)


def _ids(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _NAMED_IDS} more" if len(ids) > _NAMED_IDS else ""
    return f"trajectories {', '.join(map(str, ids[:_NAMED_IDS]))}{more}"


def _not_finite(batch: TrainBatch, sums: _Sums) -> list[int]:
    """The trajectories whose log-probability or reward is not finite; all, if only their sum is not."""
    finite = (sums.policy_BK.isfinite() & batch.reward_BK.isfinite()).flatten().tolist()
    broken = [row.id for row, good in zip(batch.rows, finite, strict=True) if not good]
    return broken or [row.id for row in batch.rows]


def _worst(norm: float) -> float:
    return norm if math.isfinite(norm) else math.inf
