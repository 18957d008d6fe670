"""A layer whose choices are its arguments, in the form `ep_fx.moe`: expert e multiplies its rows by a number."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import ep_fx


class Factors(nn.Module):
    """Experts that multiply by `factors`, each a diagonal matrix [8, 8]."""

    def __init__(self, factors: Sequence[float], dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter((torch.tensor(factors).view(-1, 1, 1) * torch.eye(8)).to(dtype))
        self.num_experts = len(factors)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (torch.einsum("td,tkdf->tkf", x, self.w[ids]) * weights.unsqueeze(-1)).sum(1)


def by_moe(module: Factors, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same as an exchange."""

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        result: Tensor = torch.ops.ep_fx.grouped_mm(rows, module.w, counts, None, False)
        return result

    return ep_fx.moe(x, ids, weights, experts, module.num_experts)


class Routed(nn.Module):
    """``y[t] = sum over k of weights[t, k] * factors[ids[t, k]] * x[t]``."""

    def __init__(self, factors: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.experts = Factors(factors, dtype)
        ep_fx.register_experts(Factors, by_moe)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.experts(x, ids, weights)
