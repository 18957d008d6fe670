"""This project's model on real ranks, each a process of its own."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from my_project.model import Model, tokens
from torch.distributed.device_mesh import DeviceMesh

import ep_fx
from ep_fx.testing import RankError, assert_equivalent, local_mesh
from ep_fx.testing.on_ranks import EpRanks


def losses(rank: int, steps: int) -> list[float]:
    module = ep_fx.transform(Model(), local_mesh(fsdp=2, ep=2))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found = []
    for _ in range(steps):
        loss = module(tokens(rank)).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        found.append(loss.item())
    return found


def fails_on_one(rank: int) -> None:
    limit = 3
    assert rank < limit, f"rank {rank} is too large"
    dist.barrier()


def test_training_lowers_the_loss_and_ranks_agree(ep_ranks: EpRanks) -> None:
    first, *others = ep_ranks(4, losses, 3)
    assert first[2] < first[0]
    assert others == [first] * 3


@pytest.mark.ep_ranks(fsdp=2, ep=2)
def test_the_module_is_equivalent(ep_rank: int, ep_mesh: DeviceMesh) -> None:
    model = Model()
    module = ep_fx.transform(copy.deepcopy(model), ep_mesh)
    assert_equivalent(model, module, tokens(ep_rank))
    with torch.no_grad():
        model.layers[1].experts.w1.mul_(1.01)
    with pytest.raises(AssertionError, match=r"gradient  layers\.1\.experts\.w1"):
        assert_equivalent(model, module, tokens(ep_rank))


def test_a_failure_says_what_became_of_every_rank(ep_ranks: EpRanks) -> None:
    with pytest.raises(RankError) as error:
        ep_ranks(4, fails_on_one)
    assert "rank 3 of 4 failed: AssertionError: rank 3 is too large" in str(error.value)
    assert "where limit = 3" in str(error.value)
    assert "ranks 0, 1, 2 were still running" in str(error.value)
