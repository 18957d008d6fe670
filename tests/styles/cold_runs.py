"""Layers in which ranks have no token, or none for their experts, and experts that return a new tensor then."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.moe import MoE
from tests.models.tiny_moe import SwiGLUExperts
from tests.requirements.reg1_cases import DIM, HIDDEN, Run, loss_of, run_tokens
from tests.styles.nestings import made, own_mesh

FSDP = "style on the MoE, then FSDP on it"
PLANS = {"style alone": {"ep": 4}, FSDP: {"fsdp": 2, "ep": 2}}
TOKENS = (6, 0, 3, 1)


class LoopingExperts(SwiGLUExperts):
    """Experts one by one; those without a row leave no trace."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        y, start = x.new_zeros(x.shape), 0
        for expert, count in enumerate(num_tokens_per_expert.tolist()):
            rows = slice(start, start + count)
            start += count
            if count:
                inner = F.silu(x[rows] @ self.w1[expert].t()) * (x[rows] @ self.w3[expert].t())
                y[rows] = inner @ self.w2[expert].t()
        return y if scores is None else y * scores.unsqueeze(-1)


class FixedRouter(nn.Module):
    """Chooses experts 0 and 1 for every token; the experts of other ranks are cold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, DIM) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + torch.tensor([20.0, 20.0, 0.0, 0.0])


def make_layer() -> MoE:
    """The same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return MoE(FixedRouter(), LoopingExperts(4, DIM, HIDDEN), top_k=2, scores="keyword")


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank, ``[1, n, 64]``; rank 1 has none."""
    tokens, target = torch.randn(2, 1, TOKENS[rank], DIM, generator=torch.Generator().manual_seed(rank)).unbind()
    return tokens, target


def sum_loss(y: Tensor, target: Tensor) -> Tensor:
    """Of no token: 0, not NaN."""
    return loss_of(y, target) if y.numel() else y.sum()


def run(rank: int, nesting: str) -> Run:
    """Forward and backward of the styled layer."""
    module = made(nesting, make_layer(), own_mesh(**PLANS[nesting]))
    return run_tokens(module, *batch(rank), loss=sum_loss)


def frozen_input(rank: int) -> list[bool]:
    """Whether each expert parameter has a gradient, where neither tokens nor router want one."""
    layer = make_layer()
    layer.router.requires_grad_(False)
    module = made("style alone", layer, own_mesh(**PLANS["style alone"]))
    tokens, target = batch(rank)
    sum_loss(module(tokens), target).backward()
    return [p.grad is not None and bool(p.grad.to_local().any()) == (rank < 2) for p in layer.experts.parameters()]
