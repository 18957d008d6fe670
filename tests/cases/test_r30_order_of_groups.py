"""R30, process groups made only by their members, or in another order.

Sources: cornstarch-org/Cornstarch PR#76, mstar-project/mstar PR#143 (review), THUDM/slime PR#2331.
Making a group is collective over all ranks, members or not; who skips it deadlocks the others now and then. Stages of
a pipeline differ (here one is dense and one has experts, each in turn), and their ranks arrive at any time: all must
make the same groups in the same order, a second transform none, and a stage that fails must not leave the others.
"""
from __future__ import annotations

import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ep_fx
from ep_fx.testing import RankPools
from tests.models.hand_moe import HandMoE, tokens_for

Groups = list[tuple[int, ...]]


def _pipeline_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "fsdp", "ep"))


def _transform(mesh: DeviceMesh, dense: bool, run: bool) -> Groups:
    """The groups made on the way, each as its members, in order; `run`: the module must work, too."""
    made: Groups = []
    make = dist.distributed_c10d._new_group_with_tag

    def logged(ranks: list[int] | None = None, *args: object, **kwargs: object) -> object:
        made.append(tuple(range(dist.get_world_size()) if ranks is None else ranks))
        return make(ranks, *args, **kwargs)  # type: ignore[arg-type]

    model = nn.Sequential(nn.Linear(8, 8)) if dense else HandMoE()
    with mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", logged):
        module = ep_fx.transform(model, mesh["fsdp", "ep"], plan={} if dense else None)
        if run:
            module(tokens_for([0, 1, 2, 3])).sum().backward()
            assert all(p.grad is not None for p in module.parameters())
    return made


def made_groups(rank: int, repeats: int) -> list[tuple[Groups, Groups]]:
    """For each repeat, on a new mesh and after a random sleep, the groups of a first and of a second transform."""
    clock, found = random.Random(rank), []
    for repeat in range(repeats):
        time.sleep(clock.random() * 0.2)
        mesh = _pipeline_mesh()
        dense = mesh.get_local_rank("pp") == repeat % 2
        time.sleep(clock.random() * 0.2)
        first = _transform(mesh, dense, run=repeat == 0)
        found.append((first, _transform(mesh, not dense, run=repeat == 0)))
    return found


@pytest.mark.parametrize("repeats", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_r30_all_ranks_make_the_same_groups_in_the_same_order_and_only_once(ranks: RankPools, repeats: int) -> None:
    runs = ranks(4).run(made_groups, repeats)
    assert all(run == runs[0] for run in runs)
    assert len(runs[0]) == repeats
    for first, second in runs[0]:
        assert first == [(0, 1), (2, 3)]
        assert second == []


def one_stage_fails(rank: int) -> tuple[str, str, float]:
    """The second stage has three experts, which two ranks cannot share; class of the error, its text, seconds."""
    mesh = _pipeline_mesh()
    experts = 3 if mesh.get_local_rank("pp") == 1 else 4
    start = time.monotonic()
    try:
        ep_fx.transform(HandMoE(experts), mesh["fsdp", "ep"])
    except ValueError as error:
        text = str(error)
        module = ep_fx.transform(HandMoE(), mesh["fsdp", "ep"])  # and no rank is out of step
        assert module(torch.eye(8)[:4]).shape == (4, 8)
        return type(error).__name__, text, time.monotonic() - start
    return "", "", 0.0


def test_r30_a_stage_that_cannot_be_transformed_stops_the_others(ranks: RankPools) -> None:
    runs = ranks(4).run(one_stage_fails, timeout=20)
    assert [kind for kind, _, _ in runs] == ["DisagreementError"] * 2 + ["ValueError"] * 2
    for kind, text, seconds in runs:
        assert "num_experts 3 is not divisible by the mesh dimension 'ep' of size 2" in text
        assert ("rank 2, of another stage" in text) == (kind == "DisagreementError")
        assert seconds < 15
