"""A forward that casts a submodule at each call, as routers of transformers do, is traced where it is idle."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh


class Casting(nn.Module):
    """Casts to fp32 what is fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.inner.to(torch.float32)
        return torch.tanh(self.inner(x))


def _run(rank: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    options = {"transform_options": {"plan": {}}}
    report = ep_fx.check(Casting(), local_mesh(fsdp=2, ep=2), torch.randn(3, 4), **options)  # type: ignore[arg-type]
    return str(report), nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64


def test_a_cast_that_changes_nothing_may_stand_in_forward(ranks: RankPools) -> None:
    for report, casts in ranks(4).run(_run):
        assert "3 compared, 0 beyond" in report, report
        assert casts
