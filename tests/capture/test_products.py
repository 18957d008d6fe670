"""Experts that call torch's own grouped_mm trace in fp32, and the graph shows their counts."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_fx
from ep_fx.graph import Role
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.oracle import assert_all_gradients_close, gradients_of


class Experts(nn.Module):
    """One grouped product; `made_here` says whether the running totals can be traced back to counts."""

    def __init__(self, made_here: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 5.0).view(4, 1, 1) * torch.eye(8))
        self.made_here = made_here

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        totals = num_tokens_per_expert.cumsum(0).to(torch.int32)
        if not self.made_here:
            totals = totals.view(-1, 1).squeeze(1)
        return F.grouped_mm(x, self.w, offs=totals)


class Block(nn.Module):
    """Row i goes to expert i // 2."""

    def __init__(self, made_here: bool) -> None:
        super().__init__()
        self.experts = Experts(made_here)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.full((4,), 2, dtype=torch.int64, device=x.device)
        return self.experts(x, counts)


def _run(rank: int, made_here: bool) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    module = ep_fx.transform(Block(made_here), local_mesh(fsdp=1, ep=2))
    y = module(torch.ones(8, 8))
    y.sum().backward()
    graph = module.graph
    sources = [str(graph_node.args[2]) for graph_node in graph.nodes(Role.GROUPED_MM)]
    return y.detach(), {n: p.grad.full_tensor() for n, p in module.named_parameters()}, sources  # type: ignore[union-attr]


@pytest.mark.parametrize("made_here", [True, False])
def test_torch_grouped_mm_in_experts(ranks: RankPools, made_here: bool) -> None:
    eager = Block(made_here)
    want = eager(torch.ones(8, 8))
    want.backward(torch.ones_like(want))
    for y, gradients, sources in ranks(2).run(_run, made_here):
        torch.testing.assert_close(y, want)
        assert_all_gradients_close(gradients, gradients_of(eager))
        assert len(sources) == 1
        assert ("counts_of" in sources[0]) is not made_here
