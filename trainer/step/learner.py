"""One optimiser step: a batch in, metrics out.

Every rank makes every step; what it returns or raises is the same on all of them.

Shape suffixes: B prompts of the batch, K samples of each, N rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, get_scheduler

from tba.common.clock import SystemClock
from tba.common.config import TrainSection
from tba.common.errors import ConfigError, OutOfMemory, first_line
from tba.common.log import get_logger
from tba.common.system.load_errors import out_of_memory
from tba.common.wire.fields import LARGEST_REWARD
from tba.common.wire.trajectory import RowNumbers
from tba.trainer.batch.batch import Row, TrainBatch, counted, measured
from tba.trainer.batch.micro_batches import MicroBatch, micro_batches
from tba.trainer.distributed import ALONE, Ranks, full_tensor
from tba.trainer.metrics.stopwatch import Stopwatch
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.model.reference import Reference
from tba.trainer.model.scorer import LogZHead, Scorer, sequence_logprobs
from tba.trainer.objectives.from_config import Objective
from tba.trainer.preflight.check import Report
from tba.trainer.step import step_metrics
from tba.trainer.step.accumulate import Accumulator
from tba.trainer.step.host_optimizer import POLICY_GROUPS, HostAdamW, decays, policy_groups

log = get_logger(__name__)

# Names of `train.schedule` in transformers.
_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "wsd": "warmup_stable_decay"}
# How many trajectory ids an error message lists.
_NAMED_IDS = 20
_LOG_Z_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did.

    `reference` are the reference log-probabilities that the buffer did not have, by trajectory id. `rows` are numbers
    of each row of the batch. `skipped` is the reason why no update was made, `blamed` the trajectories that caused it;
    both are empty after an update.
    """

    metrics: dict[str, float]
    reference: dict[int, float]
    rows: RowNumbers
    skipped: str = ""
    blamed: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Learner:
    """The policy, its reference, the objective and the optimiser.

    `steps_done` counts updates, skipped ones included. `scorer` scores with the policy. `trained` are the parameters in
    the order of the optimiser. `taken` are the results of `take_masters`, if it is on the host. `adapter` identifies
    the policy's adapters: a checkpoint must agree with it. `report` is the preflight's: whether a GPU has memory for
    all gathered weights and gradients, and what fills it. The metrics have the `entropy`, and the share of responses
    with none of `end_ids`, the tokens that end one; None if strings do, too. `watch` measures the time of each phase.
    `copies` may still read the weights when the next update is due, which then waits for them.
    """

    scorer: Scorer
    reference: Reference
    config: TrainSection
    objective: Objective
    taken: InitVar[Mapping[str, Tensor] | None] = None
    adapter: dict[str, Any] | None = None
    ranks: Ranks = ALONE
    report: Report | None = None
    entropy: bool = False
    end_ids: frozenset[int] | None = None
    watch: Stopwatch = field(default_factory=lambda: Stopwatch(SystemClock()))
    copies: Sequence[HostBuffers] = ()
    steps_done: int = 0
    # The previous step's name of the reference, and the log-probabilities under it by trajectory id.
    _just_computed: tuple[str, dict[int, float]] = field(default_factory=lambda: ("", {}))
    _warned: bool = False

    def __post_init__(self, taken: Mapping[str, Tensor] | None) -> None:
        self.policy: PreTrainedModel = self.scorer.model
        self.head, hidden = self.objective.head, self.policy.get_input_embeddings().embedding_dim
        self.log_z = LogZHead(hidden) if self.objective.learns_log_z else None
        self._learning_rate = learning_rate_schedule(self.config)
        keeps = self.config.sharding != "all" if self.report is None else self.report.setup.gathered
        self._retain_gathered = self.ranks.size > 1 and keeps
        trained = _trained(self.policy)
        self._names, self.trained = list(trained), list(trained.values())
        self.optimizer = self._make_optimizer(taken)

    def _make_optimizer(self, masters: Mapping[str, Tensor] | None) -> torch.optim.AdamW:
        config, policy = self.config, self.policy
        rate, decay = config.learning_rate, config.weight_decay
        settings: dict[str, Any] = {"lr": rate, "betas": config.adam_betas, "weight_decay": decay}
        if masters is None:
            fused = policy.device.type == "cuda"
            optimizer = torch.optim.AdamW(policy_groups(self.trained), fused=fused, **settings)
        else:
            values = [masters[name] for name in self._names]
            optimizer = HostAdamW(self.trained, values, self.ranks, **settings)
        if self.log_z is not None:
            # The head starts at zero and has large gradients at first. It has its own learning rate and is clipped
            # separately, so that it does not scale down the policy's gradient.
            head = list(self.log_z.to(policy.device).parameters())
            optimizer.add_param_group({"params": head, "lr": _LOG_Z_LEARNING_RATE, "weight_decay": 0.0})
            self.trained += head
        return optimizer

    def masters(self) -> dict[str, Tensor]:
        """Return the float32 weights on the host by name, or this rank's shards of them; {} without `train.offload`."""
        if not isinstance(self.optimizer, HostAdamW):
            return {}
        return dict(zip(self._names, (master.detach() for master in self.optimizer.masters), strict=True))

    def resume(self, step: int, state: dict[int, dict[str, Tensor]]) -> None:
        """Continue after `step` steps with this state of the optimiser. Weights and masters are restored before."""
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.push()
        self.steps_done = step

    def step(self, batch: TrainBatch) -> StepResult:
        """Make one update.

        If a loss, gradient or reference log-probability is not finite, or a reward is huge, the step is skipped: it
        counts, but weights and optimiser do not change. Raises ConfigError for token ids outside the vocabulary.
        """
        check_tokens(batch.rows, self.scorer.vocabulary)
        self._check_floor(batch)
        with self.watch.phase("reference"):
            reference_BK, computed, of_tokens = self._complete_reference(batch)
        finite = {id_: logprob for id_, logprob in computed.items() if math.isfinite(logprob)}
        if len(finite) < len(computed):
            blamed = sorted(computed.keys() - finite.keys())
            reason = "a reference log-probability is not finite"
            return self._skip(batch, finite, step_metrics.no_numbers(batch.rows), reason, blamed)
        beta = beta_at(self.config, self.steps_done)
        sums = self.accumulate(batch, reference_BK, beta, of_tokens)
        with self.watch.phase("optimizer"):
            norms = self._clip_gradients()
            broken = _broken(batch, sums)
            if broken or not all(map(math.isfinite, (sums.loss, *norms))):
                worst = max(norms, key=lambda norm: norm if math.isfinite(norm) else math.inf)
                reason = f"loss {sums.loss}, gradient norm {worst}"
                rows = step_metrics.row_numbers(sums.quantities_QBK, sums.log_ratio_R, batch.rows, skipped=True)
                return self._skip(batch, finite, rows, reason, broken or [row.id for row in batch.rows])
            cosine = step_metrics.gradient_cosine(self.optimizer, self.ranks)
            ratios = self._policy_metrics(batch, sums)
            by_ess = self.config.learning_rate_by_ess
            learning_rate = self._update(math.sqrt(ratios.get("effective_sample_ratio", 1.0)) if by_ess else 1.0)
        metrics = {
            "loss": sums.loss,
            **step_metrics.balance_metrics(sums.policy_BK, reference_BK, batch.reward_BK, beta),
            **ratios,
            **step_metrics.stale_metrics(batch, sums.log_ratio_BK),
            **step_metrics.batch_metrics(batch, self.end_ids),
            "grad_norm": norms[0],
            "grad_clipped": float(norms[0] > self.config.max_grad_norm),
            "grad_cosine": cosine,
            "learning_rate": learning_rate,
            "beta": beta,
            "reference_computed": float(len(computed)),
            "skipped": 0.0,
        }
        rows = step_metrics.row_numbers(sums.quantities_QBK, sums.log_ratio_R, batch.rows, skipped=False)
        return StepResult(step_metrics.only_finite(metrics), computed, rows)

    def step_in_memory(self, batch: TrainBatch) -> StepResult:
        """Make one update, like `step`, but raise OutOfMemory with advice if memory runs out.

        A restart that repeats the step would run out of the same memory, so the error says what to change.
        """
        try:
            return self.step(batch)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in step {batch.step} ({first_line(error)}): {self._memory_advice(batch)}; then pass "
                "--resume"
            ) from error

    def _memory_advice(self, batch: TrainBatch) -> str:
        if self.report is not None and self.report.states_fill:
            return (
                "weights, gradients and optimiser states fill the memory, so smaller micro-batches are of little use: "
                'train on more GPUs (train.gpu), set train.offload = "optimizer", or train adapters (lora.rank, not in '
                "tba sft)"
            )
        longest = max(row.tokens for row in batch.rows)
        return (
            f"lower train.micro_batch_tokens, which is {self.config.micro_batch_tokens} (less than the {longest} "
            "tokens of the longest trajectory here is of no use), or set train.gradient_checkpointing = true"
        )

    def _clip_gradients(self) -> list[float]:
        """Clip gradients. Returns their norms before it: of the policy, and of a learned log Z if there is one."""
        # In the same order with and without `train.offload`: the norm is a sum.
        policy, head = self.trained[: len(self._names)], self.trained[len(self._names) :]
        limit, norms = self.config.max_grad_norm, []
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.collect()
            norms.append(self.optimizer.clip(limit))
            policy = []
        parts = filter(None, (policy, head))
        return norms + [float(full_tensor(nn.utils.clip_grad_norm_(part, limit))) for part in parts]

    def _update(self, scale: float) -> float:
        """Apply the gradients, at a scale of the scheduled learning rate. Returns the learning rate."""
        learning_rate = scale * self._learning_rate(self.steps_done)
        self._wait_for_copies()
        for group in self.optimizer.param_groups[:POLICY_GROUPS]:
            group["lr"] = learning_rate
        self.optimizer.step()
        self._count_step()
        return learning_rate

    def _wait_for_copies(self) -> None:
        """Make the device wait for copies to the host that still read the weights."""
        for one in self.copies:
            one.before_update()

    def _count_step(self) -> None:
        self.optimizer.zero_grad()
        self.steps_done += 1
        self.reference.update(self.policy, self.steps_done)

    def _skip(
        self, batch: TrainBatch, reference: dict[int, float], rows: RowNumbers, reason: str, blamed: list[int]
    ) -> StepResult:
        """Count a step without an update. Later steps are as if this one had had a learning rate of zero."""
        self._wait_for_copies()
        self._count_step()
        of_step = {"reference_computed": float(len(reference)), "skipped": 1.0}
        metrics = step_metrics.batch_metrics(batch, self.end_ids) | of_step
        return StepResult(step_metrics.only_finite(metrics), reference, rows, f"{reason}: {_ids(blamed)}", blamed)

    def _policy_metrics(self, batch: TrainBatch, sums: Accumulator) -> dict[str, float]:
        """Return metrics of the policy's log-probabilities against those of sampling."""
        rows, measured_N = batch.rows, measured(batch.rows)
        log_ratio_N, log_ratio_R = sums.log_ratio_BK.flatten()[measured_N], sums.log_ratio_R
        lengths_N, mask_R = torch.tensor([len(row.response_ids) for row in rows]), counted(rows)
        measured_R = mask_R & measured_N.repeat_interleave(lengths_N)
        # The sampler of these rows has the same weights, so the difference is numerical error alone.
        same_R = mask_R & torch.tensor([row.on_policy for row in rows]).repeat_interleave(lengths_N)
        ratios = log_ratio_N if self.objective.ratio_of_response else log_ratio_R[measured_R]
        entropy, tokens = sums.entropy_2.tolist()
        return {
            **step_metrics.off_policy_metrics(log_ratio_N),
            **step_metrics.truncated_fraction(ratios, self.objective.ratio_bounds),
            **step_metrics.mismatch_metrics(log_ratio_R[same_R]),
            **({"entropy": entropy / tokens} if tokens else {}),
        }

    def accumulate(
        self,
        batch: TrainBatch,
        reference_BK: Tensor,
        beta: float,
        reference_of_tokens: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Accumulator:
        """Add the gradient of the whole batch to the parameters."""
        accumulator = Accumulator(
            scorer=self.scorer,
            objective=self.objective,
            log_z=self.log_z,
            ranks=self.ranks,
            watch=self.watch,
            entropy=self.entropy,
            retain_gathered=self._retain_gathered,
            batch=batch,
            reference_BK=reference_BK,
            beta=beta,
            reference_of_tokens=reference_of_tokens,
        )
        accumulator.run(self.plan(batch.rows, batch.samples))
        return accumulator

    def plan(self, rows: Sequence[Row], group_size: int, scorer: Scorer | None = None) -> list[MicroBatch]:
        """Return this rank's micro-batches of some rows, of which `group_size` after one another form a group.

        `scorer` is what computes them, by default the policy's.
        """
        return micro_batches(
            [[one.tokens for one in row.sequences] for row in rows],
            group_size,
            limit=self.config.micro_batch_tokens,
            split=(scorer or self.scorer).passes,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
        )

    @torch.no_grad()
    def _complete_reference(self, batch: TrainBatch) -> tuple[Tensor, dict[int, float], dict[int, Tensor]]:
        """Return the reference log-probabilities of the batch, and by trajectory id those computed for it.

        If the objective does not use them, none are computed and those that are not stored stay NaN. For an
        objective that needs them, the third are those of the tokens of all rows, which are computed in every step.
        """
        # A resumed run must train on the same values as an uninterrupted one, bit for bit, and after a resume the
        # stored values are used. Two computations of one value may differ in the last bit, as they depend on the
        # other rows of the pass. So a trajectory that is in the batch twice is computed once, and values that the
        # previous step computed are reused: this batch may have been requested before they were stored.
        name, earlier = self._just_computed
        own = self.reference.name_at(self.steps_done)
        earlier = earlier if name == own else {}
        known = {
            row.id: earlier.get(row.id, stored) if math.isnan(stored) else stored
            for row, stored in zip(batch.rows, batch.reference_BK.flatten().tolist(), strict=True)
        }
        needed = batch.rows if self.objective.needs_reference else []
        by_token = self.objective.reference_of_tokens
        missing = {row.id: row for row in needed if by_token or math.isnan(known[row.id])}
        unknown = list(missing.values())
        sequence_N = torch.zeros(len(unknown), dtype=torch.float64)
        lengths = [len(row.response_ids) if by_token else 0 for row in unknown]
        token_R = torch.zeros(sum(lengths))
        of_tokens = torch.split(token_R, lengths)
        for micro_batch in self.plan(unknown, 1, self.reference.scorer):
            rows = [unknown[index] for index in micro_batch.rows]
            # Groups of one row are never split.
            (chunk,) = micro_batch.chunks
            logprob_R = self.reference.score(rows, chunk.passes).logprob_R
            if rows:
                sequence_N[micro_batch.rows] = sequence_logprobs(logprob_R, rows).cpu()
            if rows and by_token:
                parts = torch.split(logprob_R.cpu(), [lengths[index] for index in micro_batch.rows])
                for index, part in zip(micro_batch.rows, parts, strict=True):
                    of_tokens[index].copy_(part)
        sums = dict(zip(missing, self.ranks.sum(sequence_N).tolist(), strict=True))
        computed = {id_: logprob for id_, logprob in sums.items() if math.isnan(known[id_])}
        known |= computed
        self._just_computed = (own, {id_: logprob for id_, logprob in computed.items() if math.isfinite(logprob)})
        reference = torch.tensor([known[row.id] for row in batch.rows], dtype=torch.float64)
        if by_token:
            of_tokens = torch.split(self.ranks.sum(token_R), lengths)
        return reference.view_as(batch.reward_BK), computed, dict(zip(missing, of_tokens, strict=True))

    def _check_floor(self, batch: TrainBatch) -> None:
        """Log once that a reward is below the least reward that the objective counts from."""
        least, floor = float(batch.reward_BK.min()), self.objective.reward_floor
        if least < floor and not self._warned:
            self._warned = True
            log.warning(
                "a reward is below objective.reward_floor, so bad answers are imitated too little or pushed away: set "
                "it to the least reward of the task",
                reward=least,
                reward_floor=floor,
                step=batch.step,
            )


def learning_rate_schedule(config: TrainSection) -> Callable[[int], float]:
    """Return the learning rate as a function of the number of updates made before, so that a resume needs no state.

    The schedules of transformers are stateful objects around a pure function; only that function is used.
    """
    warmup, decay = _phases(config)
    scheduler = get_scheduler(
        _SCHEDULES[config.schedule],
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=config.steps,
        scheduler_specific_kwargs={"num_decay_steps": decay} if config.schedule == "wsd" else None,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return lambda step: config.learning_rate * factor(step)


def _phases(config: TrainSection) -> tuple[int, int]:
    """Return the steps of warm-up and of decay. Warns if a setting does not fit into the run; `auto` always fits."""
    steps = config.steps
    warmup = min(50, steps // 10) if config.warmup_steps == "auto" else config.warmup_steps
    if warmup >= steps:
        log.warning(
            "the learning rate never reaches its peak: train.warmup_steps is too high", warmup_steps=warmup, steps=steps
        )
    left = max(steps - warmup, 0)
    if config.decay_steps == "auto":
        return warmup, min(500, steps // 2, left)
    # With a decay longer than the run, the schedule of transformers would start in the middle of its cosine.
    if config.schedule == "wsd" and config.decay_steps > left:
        log.warning("train.decay_steps is shortened to fit into this run", decay_steps=left, set=config.decay_steps)
    return warmup, min(config.decay_steps, left)


def beta_at(config: TrainSection, step: int) -> float:
    """Return the KL coefficient of the update after `step` updates: linear, then constant.

    With `beta_anneal_stop` the annealing stops early, and beta jumps to its final value.
    """
    stop = config.beta_anneal_stop
    if step >= config.beta_anneal_steps or (stop != "off" and step >= stop):
        return config.beta_final
    return config.beta + (config.beta_final - config.beta) * step / config.beta_anneal_steps


def check_tokens(rows: Sequence[Row], vocabulary: int) -> None:
    """Raise ConfigError for an id outside the vocabulary: an obscure device error, or silently another token."""
    for row in rows:
        for tokens in (row.prompt_ids, row.response_ids, row.kept[row.kept > 0] - 1):
            if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocabulary):
                raise ConfigError(
                    f"trajectory {row.id} has token ids outside the model's vocabulary of {vocabulary}: searchers, "
                    "imported rows and trainer must be of the same model"
                )


def _trained(policy: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the policy's trained parameters by name, in the order of the optimiser's groups."""
    trained = [(name, one) for name, one in policy.named_parameters() if one.requires_grad]
    return dict(sorted(trained, key=lambda pair: not decays(pair[1])))


def _ids(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _NAMED_IDS} more" if len(ids) > _NAMED_IDS else ""
    return f"trajectories {', '.join(map(str, ids[:_NAMED_IDS]))}{more}"


def _broken(batch: TrainBatch, sums: Accumulator) -> list[int]:
    """Return the trajectories whose log-probability is not finite, or whose reward the buffer would refuse."""
    finite = (sums.policy_BK.isfinite() & (batch.reward_BK.abs() <= LARGEST_REWARD)).flatten().tolist()
    return [row.id for row, good in zip(batch.rows, finite, strict=True) if not good]
