"""The turns of rows for an objective: their tokens, what came before each, and its reward.

Shape suffixes: R response tokens of all rows, S turns.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from tba.trainer.batch.batch import Row, counted
from tba.trainer.objectives.responses import Turns, row_totals


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
