"""HandMoE: an MoE whose outputs and gradients are known by hand.

Expert e computes ``x @ w[e]`` with ``w[e] = (e + 1) I``, all in one parameter [4, 8, 8]; top-1, score exactly 1; a
token for expert e is one-hot(e). With ``loss = y.sum(-1).mean()`` over a rank's tokens, `w[e].grad` is non-zero in
row e only, and each entry of that row is G[e], the mean over ranks of (count of e / tokens of the rank).
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.models.moe import MoE, Scores, gathered_product, grouped_product


class HandExperts(nn.Module):
    """``x @ w[e]`` for rows in expert order."""

    def __init__(self, num_experts: int = 4, dim: int = 8, grouped: bool = False) -> None:
        super().__init__()
        factors = torch.arange(1, num_experts + 1.0).view(-1, 1, 1)
        self.w = nn.Parameter(factors * torch.eye(dim))
        self.product = grouped_product if grouped else gathered_product

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        y = self.product(x, self.w, num_tokens_per_expert)
        return y if scores is None else y * scores.unsqueeze(-1)


class HandMoE(MoE):
    """The block of this page; `num_experts`, `dim`, `top_k` and the rest may be varied."""

    def __init__(
        self, num_experts: int = 4, dim: int = 8, top_k: int = 1, scores: Scores = "after", grouped: bool = False
    ) -> None:
        router = nn.Linear(dim, num_experts, bias=False)
        with torch.no_grad():
            router.weight.copy_(10 * torch.eye(num_experts, dim))
        super().__init__(router, HandExperts(num_experts, dim, grouped), top_k, scores)


def tokens_for(experts: Sequence[int], dim: int = 8) -> Tensor:
    """One token for each of `experts`: [len(experts), dim]."""
    return torch.eye(dim)[torch.tensor(experts, dtype=torch.long)]


def hand_loss(y: Tensor) -> Tensor:
    """Mean over the local tokens of the sum over features."""
    return y.sum(-1).mean()


def hand_shares(routings: Sequence[Sequence[int]], num_experts: int = 4) -> list[float]:
    """G: for each expert the mean over ranks of its share of the rank's tokens."""
    return [sum(r.count(e) / len(r) for r in map(list, routings)) / len(routings) for e in range(num_experts)]


def hand_gradient(shares: Sequence[float], dim: int = 8) -> Tensor:
    """The gradient of `w` [E, dim, dim] for G = `shares`."""
    gradient = torch.zeros(len(shares), dim, dim)
    for expert, share in enumerate(shares):
        gradient[expert, expert] = share
    return gradient
