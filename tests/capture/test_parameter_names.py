"""A parameter may be called anything that Python allows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh


class Capitals(nn.Module):
    """Names in capital letters, which torch.fx writes small."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.wQ = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
        self.E = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.E(x * self.A_log) * self.wQ)


def _run(rank: int) -> str:
    torch.manual_seed(0)
    return str(ep_fx.check(Capitals(), local_mesh(fsdp=2, ep=2), torch.randn(3, 4), transform_options={"plan": {}}))


def test_capital_letters_in_names_are_kept_apart_from_the_names_of_nodes(ranks: RankPools) -> None:
    for report in ranks(4).run(_run):
        assert "5 compared, 0 beyond" in report, report
