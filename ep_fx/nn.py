"""Modules written in a form that `transform` recognises."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ep_fx import ops as _ops  # noqa: F401  registers the dialect


class GroupedExperts(nn.Module):
    """SwiGLU experts on rows in expert order: ``(silu(x w1') * (x w3')) w2'``.

    Args:
        dim: features of a row.
        hidden: features inside an expert.
        num_experts: number of experts E.

    Parameters are ``w1, w3 [E, hidden, dim]`` and ``w2 [E, dim, hidden]``.
    """

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(features of the input), as in most MoE models."""
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(
        self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor, scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows through their experts.

        Args:
            x: [N, dim] in expert order.
            num_tokens_per_expert: [E] int64, its sum at most N; rows beyond it give 0.
            scores: [N], multiplied to the rows of the result; None: nothing is.

        Returns:
            [N, dim].
        """
        product = torch.ops.ep_fx.grouped_mm
        counts = num_tokens_per_expert
        inner = F.silu(product(x, self.w1, counts, None, True)) * product(x, self.w3, counts, None, True)
        y: torch.Tensor = product(inner, self.w2, counts, None, True)
        return y if scores is None else y * scores.unsqueeze(-1).to(y.dtype)
