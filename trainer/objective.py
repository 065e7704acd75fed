"""The objective: a pure function of tensors, and what can be read off it.

Shape suffixes: B prompts of a batch, K sampled responses of each.
"""

from torch import Tensor


def trajectory_balance(policy_BK: Tensor, reference_BK: Tensor, reward_BK: Tensor, beta: float) -> Tensor:
    """Trajectory Balance with the VarGrad estimate of log Z (Bartoldson et al. 2025, Eq. 4 and 5), times beta / 2.

        log Z_i = 1/K sum_j [ log ref_ij - log pi_ij + r_ij / beta ]                   (Eq. 4, detached)
        loss    = beta/2 * 1/(BK) sum_ij ( log Z_i + log pi_ij - log ref_ij - r_ij / beta )^2     (Eq. 5)

    `policy_BK` and `reference_BK` are log-probabilities of whole responses. The gradient is that of Eq. 7,
    the mean of -A_ij grad log pi_ij with A_ij = (r_ij - mean r_i) - beta (KL_ij - mean KL_i): beta / 2 takes
    away the 1/beta by which Eq. 5 would grow while beta is annealed, so clipping means the same all along.

    The public code differs: TBA's first release leaves out beta / 2, tba-prime takes the mean KL under the
    weights that generated and divides by tokens. Here log Z is under the policy that is being trained, over
    the K samples of one prompt, and nothing is divided by lengths.
    """
    residual_BK = _residual(policy_BK, reference_BK, reward_BK, beta)
    return beta / 2 * residual_BK.square().mean()


def trajectory_balance_metrics(
    policy_BK: Tensor, reference_BK: Tensor, reward_BK: Tensor, beta: float
) -> dict[str, float]:
    """What the objective saw. `kl` is an estimate of KL(policy || reference) only on fresh data.

    The mean residual of a prompt is zero by construction, so its spread is what says how far the policy is
    from the optimum; the advantage of Eq. 7 is -beta times the residual.
    """
    residual_BK = _residual(policy_BK, reference_BK, reward_BK, beta).detach()
    return {
        "log_z": float(_log_z(policy_BK, reference_BK, reward_BK, beta).mean()),
        "residual_mean": float(residual_BK.mean()),
        "residual_std": float(residual_BK.std(correction=0)),
        "advantage_std": beta * float(residual_BK.std(correction=0)),
        "kl": float((policy_BK - reference_BK).detach().mean()),
    }


def _residual(policy_BK: Tensor, reference_BK: Tensor, reward_BK: Tensor, beta: float) -> Tensor:
    log_z_B1 = _log_z(policy_BK, reference_BK, reward_BK, beta)
    return log_z_B1 + policy_BK - reference_BK - reward_BK / beta


def _log_z(policy_BK: Tensor, reference_BK: Tensor, reward_BK: Tensor, beta: float) -> Tensor:
    return (reference_BK - policy_BK.detach() + reward_BK / beta).mean(dim=1, keepdim=True)
