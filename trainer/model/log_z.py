"""A head that predicts log Z of a prompt, for the objective `tb_learned_z`.

Shape suffixes: b prompts, H hidden size.
"""

from torch import Tensor, nn


class LogZHead(nn.Module):
    """log Z(x) as a linear function of the mean of the prompt's last hidden states (Lee et al. 2024).

    The hidden states are detached: the policy is not trained to make log Z easier to predict. All weights start at
    zero, and so does log Z.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, prompt_bH: Tensor) -> Tensor:
        """Return log Z: [b] in float64, on the CPU, where losses are computed."""
        log_z_b: Tensor = self.linear(prompt_bH.detach().float())[:, 0].double().cpu()
        return log_z_b
