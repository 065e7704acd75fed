"""Objectives that are squared residuals: each is zero at a known optimum, whichever policy sampled the responses.

`optimal_advantage` is so only if `value_beta` is beta. `from_config` makes `tb_stale` of `policy_gradient`.

Shape suffixes: b prompts of a micro-batch, K responses to each, N = b x K rows, R response tokens, T counted tokens of
the longest row, S turns.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tba.trainer.objectives.advantages import imitation, standardised, taper
from tba.trainer.objectives.responses import Responses, Terms, Turns, row_totals


def trajectory_balance(
    responses: Responses,
    beta: float,
    *,
    imitation_weight: float = 0.0,
    floor: float | Literal["group"] = 0.0,
    taper_kind: str = "off",
) -> Terms:
    """Return the Trajectory Balance loss with VarGrad's log Z (Bartoldson et al. 2025, Eq. 4 and 5), times beta / 2.

        log Z_i = 1/K sum_j [ log ref_ij - log pi_ij + r_ij / beta ]                   (Eq. 4, detached)
        loss    = beta/2 * 1/(BK) sum_ij ( log Z_i + log pi_ij - log ref_ij - r_ij / beta )^2     (Eq. 5)

    Log-probabilities are of whole responses. The gradient is that of Eq. 7, the mean of -A_ij grad log pi_ij with
    A_ij = (r_ij - mean r_i) - beta (KL_ij - mean KL_i). Without the factor beta / 2 the gradient would grow as 1/beta
    while beta is annealed, and gradient clipping would mean something else at each step.

    The authors' code differs: TBA's first release has no factor beta / 2; tba-prime computes the mean KL under the
    weights that generated, and divides by tokens. Here log Z is under the policy being trained, over the K samples of
    one prompt, and nothing is divided by lengths.

    With `imitation_weight` and `taper_kind`, for stale data:

        loss = 1/(BK) sum_ij w_ij [ beta/2 (...)^2 - I_ij log pi^T_ij ],    I: `imitation`, w: `taper` of A_ij + I_ij

    The gradient is the mean of -w_ij (A_ij + I_ij) grad log pi_ij: the baseline of Eq. 7, lowered. The sampler is
    imitated at its own temperature T; the residual is at temperature 1, as everywhere in Trajectory Balance.
    """
    reward_bK = responses.reward_bK
    residual_bK = vargrad_residual(responses.policy_bK, responses.reference_bK, reward_bK, beta)
    raised_bK = responses.only_known(imitation(reward_bK, imitation_weight, floor))
    advantage_bK = (raised_bK - beta * residual_bK).detach()
    weight_bK = taper(responses, advantage_bK, taper_kind)
    loss = beta / 2 * (weight_bK * residual_bK.square()).sum()
    loss = (loss - (weight_bK * raised_bK * responses.at_sampling_bK).sum()) / responses.totals.rows
    return Terms(loss, advantage_bK, weight_bK)


def trajectory_balance_learned_z(responses: Responses, beta: float) -> Terms:
    """Return the Trajectory Balance loss with a learned log Z (Malkin et al. 2022; Lee et al. 2024), times beta / 2.

        loss = beta/2 * 1/(BK) sum_ij ( log Z(x_i) + log pi_ij - log ref_ij - r_ij / beta )^2

    `responses.log_z_bK` has a gradient too: the head learns the mean that VarGrad computes from the group, so a single
    response per prompt is enough. Raises ValueError if it is None.
    """
    if responses.log_z_bK is None:
        raise ValueError("tb_learned_z needs a learned log Z")
    target_bK = responses.reference_bK + responses.reward_bK / beta
    residual_bK = responses.log_z_bK + responses.policy_bK - target_bK
    loss = beta / 2 * residual_bK.square().sum() / responses.totals.rows
    return Terms(loss, -beta * residual_bK.detach(), torch.ones_like(target_bK))


def flow_balance(responses: Responses, beta: float, *, low: float, high: float) -> Terms:
    """Return the FlowRL loss (Zhu et al. 2025, arXiv 2509.15207), times beta / 2.

        residual_ij = log Z(x_i) + 1/T_ij (log pi_ij - log ref_ij) - A_ij / beta
        loss        = beta/2 * 1/(BK) sum_ij w_ij residual_ij^2,    w_ij = sg[ clip(rho_ij, 1 - low, 1 + high) ]

    A is `standardised`, log Z learned, T_ij the counted tokens, and the paper's beta is 1 / beta. The optimum is
    pi = ref exp( T (A / beta - log Z) ): each token has a reward, less what makes the sum 1. With equal lengths it is
    T times as sharp as that of `trajectory_balance`. The authors' first release, with 15 for 1 / beta, computes w and
    then weights by rho, not clipped, which has the same optimum; its log Z also trains the policy, here the head is
    alone.
    Raises ValueError without a log Z.
    """
    if responses.log_z_bK is None:
        raise ValueError("flowrl needs a learned log Z")
    ratio_bK = (responses.policy_bK - responses.reference_bK) / responses.tokens_bK.clamp(min=1)
    residual_bK = responses.log_z_bK + ratio_bK - standardised(responses.reward_bK) / beta
    weight_bK = responses.log_ratio_bK.detach().exp().clamp(1 - low, 1 + high)
    loss = beta / 2 * (weight_bK * residual_bK.square()).sum() / responses.totals.rows
    return Terms(loss, -beta * residual_bK.detach(), weight_bK)


def turn_balance(responses: Responses, beta: float) -> Terms:
    """Return the Trajectory Balance loss at the boundaries of turns, with a log Z of each history h.

        c_t        = sg[ log Z(h_t+1) ] + r_t / beta + log ref(a_t|h_t) - log pi(a_t|h_t),   0 after the last turn
        log Z(h)   = sg[ mean of c_t over the turns of the group with h_t = h ],   or learned where there is only one
        residual_t = log Z(h_t) - c_t
        loss       = beta/2 * 1/(BK) sum_ijt residual_ijt^2

    A learned log Z has a gradient in the residual. With one turn it is `trajectory_balance`. docs/objectives.md derives
    why random observations do not move the optimum, whichever policy sampled. The advantage of a response is the mean
    over its turns. Raises ValueError if there are no `responses.turns`.
    """
    turns = responses.turns
    if turns is None:
        raise ValueError('log_z = "turn" needs the turns of the responses')
    policy_S = row_totals(responses.logprob_R[responses.mask_R], turns.lengths)
    learned_S = turns.value_S / beta
    own_S = (turns.reward_S / beta + turns.reference_S - policy_S).detach()
    log_z_S, next_S = _log_z_of_histories(turns, own_S, learned_S.detach())
    residual_S = torch.where(turns.shared_S, log_z_S, learned_S) + policy_S - policy_S.detach() - own_S - next_S
    loss = beta / 2 * residual_S.square().sum() / responses.totals.rows
    total_N = torch.zeros(len(responses.lengths), dtype=torch.float64).index_add_(0, turns.row_S, residual_S.detach())
    advantage_bK = -beta * (total_N / turns.row_S.bincount()).view_as(responses.reward_bK)
    return Terms(loss, advantage_bK, torch.ones_like(advantage_bK))


def _log_z_of_histories(turns: Turns, own_S: Tensor, learned_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Z of the history of each turn, and of that of the next turn of its row: [S] each.

    `own_S` is c_t without log Z(h_t+1). Last turns come first: the turns of one history have the same depth, and the
    next turn of a row follows in S.
    """
    times_H = turns.history_S.bincount()
    log_z_S, next_S = torch.zeros_like(own_S), torch.zeros_like(own_S)
    for depth in range(int(turns.depth_S.max()), -1, -1):
        here = (turns.depth_S == depth).nonzero()[:, 0]
        history = turns.history_S[here]
        total_H = torch.zeros_like(own_S).index_add_(0, history, (own_S + next_S)[here])
        log_z_S[here] = torch.where(turns.shared_S[here], total_H[history] / times_H[history], learned_S[here])
        if depth:
            next_S[here - 1] = log_z_S[here]
    return log_z_S, next_S


def prefix_balance(responses: Responses, beta: float) -> Terms:
    """Return the Trajectory Balance loss with constraints on all prefixes of a response, 2n more for n counted tokens.

        L_t      = sum of log pi - log ref over the first t counted tokens, log Z_t = log Z of what precedes token t + 1
        rooted_t = log Z_0 + L_t - log Z_t                       from the root to a prefix
        suffix_t = log Z_t + L_n - L_t - r / beta                from a prefix to the end
        loss     = beta/2 * 1/(BK) sum_ij [ residual_ij^2 + 1/n sum_{t < n} ( rooted_t^2 + suffix_t^2 ) ]

    residual_ij is that of `trajectory_balance`. The suffixes are multi-step path consistency (Guo et al. 2021, arXiv
    2106.07704), with log Z in place of the value; constraints at the root instead of all n^2 sub-trajectories are from
    RapTB (Wang et al. 2026, arXiv 2603.00454), which has no log Z of a prefix but a target made of the suffix's
    rewards. log Z_t is learned, and has a gradient in both. All are 0 exactly where pi = ref exp(r / beta) / Z and
    log Z_t is the logarithm of the mean of exp(r / beta) over what the reference would append.

    The advantage of a response is the mean over its tokens. Raises ValueError without values and references of tokens.
    """
    if responses.value_R is None or responses.reference_R is None:
        raise ValueError("tb_prefix needs a learned value and the reference of each token")
    mask_R, tokens_N = responses.mask_R, responses.tokens_bK.flatten()
    whole_bK = vargrad_residual(responses.policy_bK, responses.reference_bK, responses.reward_bK, beta)
    log_ratio_NT, log_z_NT = (
        pad_sequence(list(torch.split(value_R[mask_R].double(), tokens_N.int().tolist())), batch_first=True)
        for value_R in (responses.logprob_R - responses.reference_R, responses.value_R / beta)
    )
    place_T = torch.arange(log_ratio_NT.shape[1])
    before_NT = log_ratio_NT.cumsum(1) - log_ratio_NT
    counts_NT = (place_T < tokens_N[:, None]) / tokens_N[:, None].clamp(min=1)
    rooted_NT = log_z_NT[:, :1] + before_NT - log_z_NT
    target_NT = (responses.reward_bK / beta).flatten()[:, None] - log_ratio_NT.sum(1, keepdim=True) + before_NT
    suffix_NT = log_z_NT - target_NT
    squares_N = (counts_NT * (rooted_NT.square() + suffix_NT.square())).sum(1)
    loss = beta / 2 * (whole_bK.square().sum() + squares_N.sum()) / responses.totals.rows
    # Token t + 1 is in suffix_0 to suffix_t, and in rooted_t+1 to rooted_n-1.
    times_NT = place_T * rooted_NT + (tokens_N[:, None] - place_T) * suffix_NT
    parts_N = (counts_NT * times_NT).sum(1) / tokens_N.clamp(min=1)
    return Terms(loss, -beta * (whole_bK + parts_N.view_as(whole_bK)).detach(), torch.ones_like(whole_bK))


def optimal_advantage(responses: Responses, beta: float, value_beta: float) -> Terms:
    """Return the OAPL loss: regression on the optimal advantage (Ritter et al. 2026, arXiv 2602.19362).

        V_i  = value_beta * log( 1/K sum_j exp(r_ij / value_beta) )
        loss = 1/(2 beta) * 1/(BK) sum_ij ( beta (log pi_ij - log mu_ij) - (r_ij - V_i) )^2

    mu is the policy that sampled, and pi is at its temperature; there is no reference model and no importance weight.
    Both sums are over the responses of a known sampler: the others say nothing about pi / mu, nor about the mean.
    The factor 1/(2 beta) is not in the paper: with it the gradient is the mean of -A_ij grad log pi_ij in reward
    units, as in `trajectory_balance`, which differs in its anchor and in that its baseline depends on the policy.
    """
    known_bK = responses.only_known(torch.ones_like(responses.reward_bK)).bool()
    soft_bK = torch.where(known_bK, responses.reward_bK / value_beta, -torch.inf)
    value_b1 = value_beta * (soft_bK.logsumexp(dim=1, keepdim=True) - known_bK.double().sum(dim=1, keepdim=True).log())
    residual_bK = beta * responses.log_ratio_bK - (responses.reward_bK - value_b1)
    loss = torch.where(known_bK, residual_bK, 0.0).square().sum() / (2 * beta * responses.totals.rows)
    return Terms(loss, -residual_bK.detach(), known_bK.double())


def vargrad_residual(policy_bK: Tensor, reference_bK: Tensor, reward_bK: Tensor, beta: float) -> Tensor:
    """Return the bracket of Eq. 5: [b, K]. Its mean over each group is zero."""
    log_z_b1 = vargrad_log_z(policy_bK, reference_bK, reward_bK, beta)
    return log_z_b1 + policy_bK - reference_bK - reward_bK / beta


def vargrad_log_z(policy_bK: Tensor, reference_bK: Tensor, reward_bK: Tensor, beta: float) -> Tensor:
    """Return log Z of Eq. 4: [b, 1], without gradient."""
    return (reference_bK - policy_bK.detach() + reward_bK / beta).mean(dim=1, keepdim=True)
