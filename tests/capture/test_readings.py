"""A model that checks sizes itself is captured where its checks hold, not where the trace's own sizes break them."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.models.hand_moe import HandMoE


class Checking(HandMoE):
    """Refuses few tokens, and gates of another shape than [tokens, 8]."""

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        if x.shape[0] < 6:
            raise ValueError(f"too few tokens: {x.shape[0]}")
        if x.shape[:1] != gates.shape[1:]:
            raise ValueError(f"gates do not fit: {x.shape}, {gates.shape}")
        return super().forward(x) * gates.t()


def two_sizes(rank: int) -> tuple[bool, int, str]:
    """Whether both are right, the number of captures, and what is said of too few tokens."""
    module, eager = ep_fx.transform(Checking(), local_mesh(fsdp=1, ep=2)), Checking()
    right = True
    for size in (8, 11):
        x, gates = torch.eye(16)[:size, :8], torch.ones(8, size)
        right &= torch.equal(module(x, gates), eager(x, gates))
    with pytest.raises(ValueError, match="too few") as refused:
        module(torch.eye(8)[:2], torch.ones(8, 2))
    return right, len(module.programs), str(refused.value)


def test_a_models_own_checks_of_sizes_meet_real_sizes(ranks: RankPools) -> None:
    for right, captures, message in ranks(2).run(two_sizes):
        assert right
        assert captures <= 2
        assert "too few tokens" in message
