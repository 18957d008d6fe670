"""A gather whose readers differ in a unary op: ``x @ w + x @ w.tanh()``.

A rival's pass that merges equal chains of gathers took the two for one and lost the tanh. Numbers must stay right under
every pipeline, with gathers freed or kept.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.oracle import assert_all_gradients_close, oracle


class TwoReadings(nn.Module):
    """One weight, read as it is and through tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + x @ self.w.tanh()


def _x(rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))


def _square(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def _run(rank: int, options: dict[str, object]) -> tuple[Tensor, dict[str, Tensor]]:
    module = ep_fx.transform(TwoReadings(), local_mesh(fsdp=2, ep=2), plan={}, **options)  # type: ignore[arg-type]
    y = module(_x(rank))
    _square(y).backward()
    return y.detach(), {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"pipeline": "expert-parallel,fsdp"},
        {"pipeline": "dead-code,fsdp,dead-code"},
    ],
    ids=str,
)
def test_both_readings_stay(ranks: RankPools, options: dict[str, object]) -> None:
    want = oracle(TwoReadings, [(_x(rank),) for rank in range(4)], _square)
    for rank, (y, gradients) in enumerate(ranks(4).run(_run, options)):
        torch.testing.assert_close(y, want.outputs[rank])
        assert_all_gradients_close(gradients, want.gradients)
