"""R06, recompute routes a few tokens differently.

Sources: pytorch/torchtitan#1117, NVIDIA-NeMo/Automodel#3325, PR#2635 and PR#3156, NVIDIA-NeMo/RL#1203,
ByteDance-Seed/VeOmni#979, verl-project/verl#7016.
Activation checkpointing runs router and exchange again in backward. Where the router is not the same twice, counts
change: saved and recomputed shapes disagree, or gradients belong to other routes than the loss. Here the router adds
noise at every second call, and its counter tells how often it was called: once a forward; there is no exchange in
backward but those of gradients, and these equal those of a model without checkpoints.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import ep_fx
from ep_fx.testing import CollectiveLog, RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.tiny_moe import Router, TinyMoE, next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, gradients_of, oracle

IDS = [(token_ids(rank),) for rank in range(4)]


class Noisy(Router):
    """Logits on a coarse grid, so that many are equal, with noise of 1e-3 at every second call."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.noise = nn.Buffer(1e-3 * torch.linspace(1, -1, num_experts))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        logits = logits + (torch.round(logits) - logits).detach()
        self.calls.add_(1)
        return logits + self.noise * (1 - self.calls % 2)


class Recomputed(TinyMoE):
    """TinyMoE with noisy routers, its blocks under checkpoints or not."""

    def __init__(self, recompute: bool, reentrant: bool = False) -> None:
        super().__init__(blocks=1)
        self.recompute, self.reentrant = recompute, reentrant
        for block in self.blocks:
            weight = block.moe.router.weight
            block.moe.router = Noisy(16, 4)
            block.moe.router.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant) if self.recompute else block(h)
        return self.head(self.norm(h))


def step(rank: int, reentrant: bool) -> dict[str, Any]:
    """Calls of each router and exchanges after forward and after backward, and gradients."""
    module, ids = ep_fx.transform(Recomputed(True, reentrant), local_mesh(**M4)), token_ids(rank)
    with CollectiveLog() as log:
        loss = next_token_loss(module(ids), ids)
        forward = len(log.of("all_to_all_single"))
        loss.backward()
    return {
        "calls": [int(buffer) for name, buffer in module.named_buffers() if name.endswith("calls")],
        "exchanges": (forward, len(log.of("all_to_all_single")) - forward),
        "gradients": {n: p.grad.full_tensor() for n, p in module.named_parameters()},  # type: ignore[union-attr]
    }


def test_r06_eager_checkpoints_route_anew() -> None:
    """The case is one: in eager mode the recomputed routes differ, and torch refuses or gradients are wrong."""
    model, plain = Recomputed(True), Recomputed(False)
    next_token_loss(plain(IDS[0][0]), IDS[0][0]).backward()
    try:
        next_token_loss(model(IDS[0][0]), IDS[0][0]).backward()
    except CheckpointError:
        return
    with pytest.raises(AssertionError, match="gradients are wrong"):
        assert_all_gradients_close(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_r06_the_router_runs_once_and_gradients_are_those_without_checkpoints(
    ranks: RankPools, reentrant: bool
) -> None:
    def make() -> TinyMoE:
        model = Recomputed(False)
        for block in model.blocks:
            block.moe.router.noise.zero_()  # the oracle calls it once for each rank
        return model

    want = oracle(make, IDS, next_token_loss, IDS).gradients
    for found in ranks(4).run(step, reentrant):
        assert found["calls"] == [1]
        assert found["exchanges"] == (3, 2), "counts and rows there, rows back; in backward rows there and back"
        assert_all_gradients_close(found["gradients"], want)
