"""The gradient of a batch: forward and backward passes, micro-batch by micro-batch.

The groups of a prompt stay whole, and every micro-batch adds its part of the batch's loss. The parts add up to the
same loss and gradient however the batch is cut, and however it is divided over ranks.

A group whose activations exceed `train.micro_batch_tokens` is computed in chunks. Its loss needs the
log-probabilities of the whole group, but the weights need only the gradient of the loss at each of them. So all
chunks are scored without a graph, the loss gives its gradient at each token, and a second forward pass over each
chunk carries that gradient to the weights: the chain rule, exact for every objective, at the cost of one more forward
pass. (GradCache, Gao et al. 2021, arXiv 2101.06983, does this for contrastive losses.)

Shape suffixes: B prompts of the batch, K samples of each, b prompts of a micro-batch, R response tokens,
Q quantities of a row, S turns.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from tba.common.wire.trajectory import QUANTITIES
from tba.trainer.batch.batch import Row, TrainBatch, counted, explored, known
from tba.trainer.batch.micro_batches import Chunk, MicroBatch
from tba.trainer.distributed import Ranks, set_gathering
from tba.trainer.metrics.stopwatch import Stopwatch
from tba.trainer.model.scorer import LogZHead, Scorer, Scores
from tba.trainer.objectives.from_config import Objective
from tba.trainer.objectives.responses import Responses, Totals, Turns, row_totals
from tba.trainer.step.step_metrics import quantities


@dataclass(slots=True)
class Accumulator:
    """Adds the gradient of one batch to the parameters, and adds up what the metrics need.

    `retain_gathered` keeps FSDP's gathered weights and unreduced gradients between micro-batches. After `run`,
    `quantities_QBK` are those of the rows (`tba.trainer.step.step_metrics`), and `log_ratio_R` the log-ratios of the
    tokens of all rows, in their order, float32. `reference_of_tokens` has the reference log-probabilities of the tokens
    of each trajectory, if the objective needs them. `entropy_2` is the sum of the entropies of counted tokens and
    their number, 0 without `entropy`.
    """

    scorer: Scorer
    objective: Objective
    log_z: LogZHead | None
    ranks: Ranks
    watch: Stopwatch
    entropy: bool
    retain_gathered: bool
    batch: TrainBatch
    reference_BK: Tensor
    beta: float
    reference_of_tokens: Mapping[int, Tensor] = field(default_factory=dict)
    quantities_QBK: Tensor = field(init=False)
    log_ratio_R: Tensor = field(init=False)
    loss: float = 0.0
    entropy_2: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    _log_ratios_of_rows: tuple[Tensor, ...] = field(init=False)

    def run(self, plan: Sequence[MicroBatch]) -> None:
        """Process all micro-batches. The results are then sums over all ranks, on every rank."""
        self.quantities_QBK = torch.zeros(len(QUANTITIES), *self.batch.reward_BK.shape, dtype=torch.float64)
        lengths = [len(row.response_ids) for row in self.batch.rows]
        self.log_ratio_R = torch.zeros(sum(lengths))
        self._log_ratios_of_rows = torch.split(self.log_ratio_R, lengths)
        for micro_batch in plan:
            last = micro_batch is plan[-1]
            if len(micro_batch.chunks) == 1:
                self._in_one_graph(micro_batch, last=last)
            else:
                self._in_chunks(micro_batch, last=last)
        if self.ranks.size > 1:
            self._sum_over_ranks()

    @property
    def policy_BK(self) -> Tensor:
        """Log-probabilities of whole responses under the policy."""
        return self.quantities_QBK[QUANTITIES.index("logprob")]

    @property
    def log_ratio_BK(self) -> Tensor:
        """`policy_BK` at the temperature of sampling, minus those of the sampler; 0 where it is unknown."""
        return self.quantities_QBK[QUANTITIES.index("log_ratio")]

    def _in_one_graph(self, micro_batch: MicroBatch, *, last: bool) -> None:
        self._set_gathering(last=last)
        rows = self._rows(micro_batch)
        with self.watch.phase("forward"):
            scores = self._score(rows, micro_batch.chunks[0])
        if rows:
            self._backward_of_loss(micro_batch, rows, scores)
        else:
            # It adds zero; the other ranks wait for this rank's part in the collectives of the backward pass.
            torch.autograd.backward(scores.logprob_R.sum())

    def _in_chunks(self, micro_batch: MicroBatch, *, last: bool) -> None:
        """Two passes over a micro-batch that exceeds the token limit, on some rank at least."""
        self._set_gathering(last=False)
        rows, chunks = self._rows(micro_batch), micro_batch.chunks
        with self.watch.phase("forward"), torch.no_grad():
            parts = [self._score(rows[chunk.rows], chunk) for chunk in chunks]
        # Each field is in all parts or in none.
        scores = Scores._make(None if one[0] is None else torch.cat(one) for one in zip(*parts, strict=True))
        leaves = scores.logprob_R.requires_grad_(), scores.tempered_R.requires_grad_()
        if rows:
            self._backward_of_loss(micro_batch, rows, scores)
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        tokens = 0
        for chunk in chunks:
            self._set_gathering(last=last and chunk is chunks[-1])
            with self.watch.phase("backward"):
                again = self.scorer.score(rows[chunk.rows], chunk.passes, tempered=True)
                part = slice(tokens, tokens + len(again.logprob_R))
                torch.autograd.backward([again.logprob_R, again.tempered_R], [gradient[part] for gradient in gradients])
            tokens = part.stop

    def _score(self, rows: Sequence[Row], chunk: Chunk) -> Scores:
        places = self.objective.value_of
        pooled = self.objective.learns_log_z and not places
        return self.scorer.score(rows, chunk.passes, tempered=True, pooled=pooled, entropy=self.entropy, places=places)

    def _rows(self, micro_batch: MicroBatch) -> list[Row]:
        return [self.batch.rows[row] for row in micro_batch.rows]

    def _set_gathering(self, *, last: bool) -> None:
        if self.ranks.size > 1:
            set_gathering(self.scorer, keep=self.retain_gathered, last=last)

    def _backward_of_loss(self, micro_batch: MicroBatch, rows: list[Row], scores: Scores) -> None:
        """Backward pass from the loss of some groups to wherever the graph of their scores begins."""
        with self.watch.phase("forward"):
            responses = self._responses(micro_batch, rows, scores)
            terms = self.objective.terms(responses, self.beta)
        with self.watch.phase("backward"):
            torch.autograd.backward(terms.loss)
        self.loss += terms.loss.item()
        if scores.entropy_R is not None:
            entropy_C = scores.entropy_R.cpu()[responses.mask_R].double()
            self.entropy_2 += torch.stack([entropy_C.sum(), torch.tensor(float(len(entropy_C)))])
        with torch.no_grad():
            log_ratio_R = responses.log_ratio_R
        self.quantities_QBK[:, micro_batch.groups] = quantities(rows, responses, terms, log_ratio_R)
        for row, part in zip(micro_batch.rows, torch.split(log_ratio_R, responses.lengths), strict=True):
            self._log_ratios_of_rows[row].copy_(part)

    def _responses(self, micro_batch: MicroBatch, rows: list[Row], scores: Scores) -> Responses:
        """Return the groups of a micro-batch as the objective takes them."""
        batch, groups, log_z_bK = self.batch, micro_batch.groups, None
        if self.log_z is not None and scores.prompt_NH is not None:
            # No prompt token attends to the response after it. The first contexts of episodes may differ.
            prompts = [row.prompt_ids.tobytes() for row in rows]
            firsts = [prompt for prompt in prompts[:: batch.samples] for _ in range(batch.samples)]
            each = batch.samples if prompts == firsts else 1
            log_z_bK = self.log_z(scores.prompt_NH[::each]).view(len(rows) // batch.samples, -1)
        return Responses(
            logprob_R=scores.logprob_R.cpu(),
            tempered_R=scores.tempered_R.cpu(),
            known_bK=known(rows).view(-1, batch.samples),
            sampled_logprob_R=torch.from_numpy(np.concatenate([row.sampling_logprobs for row in rows])),
            mask_R=counted(rows),
            lengths=[len(row.response_ids) for row in rows],
            reward_bK=batch.reward_BK[groups],
            reference_bK=self.reference_BK[groups],
            # What an explorer sampled says nothing of how far the policy has moved per step.
            staleness_bK=batch.staleness_BK[groups].masked_fill(explored(rows).view(-1, batch.samples), math.inf),
            totals=Totals(batch.prompts, len(batch.rows), int(counted(batch.rows).sum())),
            log_z_bK=log_z_bK,
            turns=self._turns(micro_batch.rows, rows, scores) if self.objective.value_of == "turn" else None,
            value_R=self._values(rows, scores) if self.objective.value_of == "token" else None,
            reference_R=self._reference_of(rows) if self.objective.reference_of_tokens else None,
        )

    def _turns(self, indices: Sequence[int], rows: Sequence[Row], scores: Scores) -> Turns:
        """Return the turns of some rows of the batch, with the learned value of what came before each."""
        batch = self.batch
        turns = turns_of(
            rows,
            batch.reward_BK.flatten()[indices],
            [batch.turn_rewards[index] if batch.turn_rewards else [] for index in indices],
            self._reference_of(rows),
            batch.samples,
        )
        if self.log_z is not None and scores.place_SH is not None:
            # A row without a counted token has a turn that starts nowhere.
            sampled_S = torch.tensor(turns.lengths) > 0
            turns.value_S[sampled_S] = self.log_z(scores.place_SH)
        return turns

    def _values(self, rows: list[Row], scores: Scores) -> Tensor:
        """Return the learned value before each counted token, and 0 at the others: [R], float64."""
        assert self.log_z is not None
        assert scores.place_SH is not None
        mask_R = counted(rows)
        zero_R = torch.zeros(len(mask_R), dtype=torch.float64)
        return zero_R.masked_scatter(mask_R, self.log_z(scores.place_SH))

    def _reference_of(self, rows: Sequence[Row]) -> Tensor:
        """Return the reference log-probabilities of the tokens of rows: [R]."""
        return torch.cat([self.reference_of_tokens[row.id] for row in rows])

    def _sum_over_ranks(self) -> None:
        """FSDP has summed the policy's gradients; those of a learned log Z are summed here."""
        ranks = self.ranks
        if self.log_z is not None:
            for parameter in self.log_z.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = ranks.sum(gradient)
        # Each row is computed by one rank, and 0 on the others.
        self.quantities_QBK, self.log_ratio_R = ranks.sum(self.quantities_QBK), ranks.sum(self.log_ratio_R)
        self.loss = float(ranks.sum(torch.tensor(self.loss, dtype=torch.float64)))
        self.entropy_2 = ranks.sum(self.entropy_2)


def turns_of(
    rows: Sequence[Row], reward_N: Tensor, turn_rewards: Sequence[Sequence[float]], reference_R: Tensor, samples: int
) -> Turns:
    """Return the turns of rows, of which `samples` after one another form a group. The learned value is 0.

    A row without a counted token is a turn without tokens. `turn_rewards` are those of each row; where there is not
    one of each turn, the last turn has the whole reward, which is right too: what was earned before is part of log Z.
    `reference_R` are log-probabilities under the reference policy.
    """
    lengths: list[int] = []
    rewards: list[float] = []
    places: list[tuple[int, int]] = []
    histories: dict[tuple[int, bytes], int] = {}
    numbers: list[int] = []
    # A trajectory that is in the group twice is one sample: it would be its own log Z.
    sharing: defaultdict[int, set[int]] = defaultdict(set)
    for n, (row, reward, parts) in enumerate(zip(rows, reward_N.tolist(), turn_rewards, strict=True)):
        spans = row.turns or [(0, 0)]
        starts = [start for start, _ in spans]
        lengths += [stop - start for start, stop in spans]
        each = list(parts) if len(parts) == len(starts) else [0.0] * len(starts)
        # What an episode gets apart from its turns, such as a penalty of its length, is known at its end.
        rewards += [*each[:-1], reward - sum(each[:-1])]
        places += [(n, depth) for depth in range(len(starts))]
        # Of samples of one prompt only, which are in one micro-batch: the loss does not depend on how a batch is cut.
        own = [histories.setdefault((n // samples, one), len(histories)) for one in _histories(row, starts)]
        numbers += own
        for history in own:
            sharing[history].add(row.id)
    row_S, depth_S = torch.tensor(places).unbind(1)
    return Turns(
        lengths=lengths,
        row_S=row_S,
        depth_S=depth_S,
        history_S=torch.tensor(numbers),
        shared_S=torch.tensor([len(sharing[history]) > 1 for history in numbers]),
        reward_S=torch.tensor(rewards, dtype=torch.float64),
        reference_S=row_totals(reference_R[counted(rows)], lengths),
        value_S=torch.zeros(len(lengths), dtype=torch.float64),
    )


def _histories(row: Row, starts: Sequence[int]) -> list[bytes]:
    """Return a hash of all tokens before each of some positions of the response, and of which of them count."""
    digest = xxhash.xxh3_128(row.prompt_ids.tobytes())
    hashes = []
    for begin, end in zip([0, *starts], starts, strict=False):
        digest.update(row.response_ids[begin:end].tobytes())
        digest.update(row.loss_mask[begin:end].tobytes())
        hashes.append(digest.digest())
    return hashes
