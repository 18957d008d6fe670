"""Experts of transformers given the index ``num_experts``, which means no expert, as their own loop takes it."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.oracle import relative_error

EXPERTS, DIM = 4, 8


class Skipping(nn.Module):
    """Routes to two of four experts, or to none where the first feature is negative."""

    def __init__(self) -> None:
        super().__init__()
        config: Any = MixtralConfig(hidden_size=DIM, intermediate_size=16, num_local_experts=EXPERTS)
        config._experts_implementation = "eager"
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = MixtralExperts(config)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3

    def forward(self, x: Tensor) -> Tensor:
        """x [T, DIM] -> [T, DIM]"""
        weights, ids = self.router(x).softmax(-1).topk(2)
        skipped = torch.stack([torch.zeros_like(x[:, 0], dtype=torch.bool), x[:, 0] < 0], dim=1)
        return x + self.experts(x, ids.masked_fill(skipped, EXPERTS), weights)


def errors(rank: int) -> dict[str, float]:
    """Relative errors of the output and of the gradients on mesh (fsdp 2, ep 2)."""
    x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(rank))
    assert (x[:, 0] < 0).any()
    whole, module = Skipping(), ep_fx.transform(Skipping(), local_mesh(fsdp=2, ep=2))
    got, want = module(x), whole(x)
    found = {"output": relative_error(got, want)}
    got.square().mean().backward()
    want.square().mean().backward()
    for (name, parameter), reference in zip(module.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(reference.grad)
        found[name] = relative_error(parameter.grad.full_tensor(), reference.grad / 4)  # type: ignore[union-attr]
    return found


def test_the_index_past_the_last_expert_means_none(ranks: RankPools) -> None:
    for found in ranks(4).run(errors):
        assert set(found) == {"output", "router.weight", "experts.gate_up_proj", "experts.down_proj"}
        assert {name: error for name, error in found.items() if not error <= 1e-5} == {}
