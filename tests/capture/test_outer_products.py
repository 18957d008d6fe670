"""Experts may multiply one column of their rows by a row of weights, as an adapter of rank 1 does."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.oracle import assert_all_gradients_close, gradients_of


class Columns(nn.Module):
    """Grouped experts whose features go through one number: once by `linear`, once by each name of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 32).view(4, 8, 1))
        self.shared = nn.ParameterList([torch.linspace(-1, 2, 8).view(1, 8) for _ in range(4)])
        self.linear = nn.Linear(1, 8)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(0, 1, 8).view(8, 1))
            self.linear.bias.fill_(0.5)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        column = torch.ops.ep_fx.grouped_mm(x, self.w, num_tokens_per_expert, None, False)
        a, b, c, d = self.shared
        y = self.linear(column) + F.linear(column, a.t()) + column @ b + torch.mm(column, c) + column.matmul(d)
        return torch.tanh(y)


class Block(nn.Module):
    """Row i goes to expert i // 2."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Columns()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.full((4,), 2, dtype=torch.int64))


def _rows() -> Tensor:
    return torch.linspace(-1, 1, 64).view(8, 8)


def _run(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    module = ep_fx.transform(Block(), local_mesh(fsdp=1, ep=2))
    y = module(_rows())
    y.sum().backward()
    return y.detach(), {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[union-attr]


def test_a_column_of_rows_times_a_row_of_weights(ranks: RankPools) -> None:
    eager = Block()
    want = eager(_rows())
    want.sum().backward()
    for y, gradients in ranks(2).run(_run):
        torch.testing.assert_close(y, want)
        assert_all_gradients_close(gradients, gradients_of(eager))
