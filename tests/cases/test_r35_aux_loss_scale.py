"""R35, the auxiliary loss loses its scale.

Sources: NVIDIA-NeMo/Automodel PR#3359 and PR#1412, databricks/megablocks#85, pytorch/torchtitan PR#2061 and PR#3000.
A balance loss enters each micro-batch undivided, is divided once more by data-parallel averaging, or depends on the
number of stages. Here it is an output of every stage and an input of the next; with the main loss zeroed its gradient
must be the oracle's on one rank, on FSDP x EP and through a pipeline, for one and for four equal micro-batches.
"""
from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.moe import MoE
from tests.models.tiny_moe import Router, SwiGLUExperts, token_ids
from tests.oracle import assert_all_gradients_close, oracle

P = {"pp": 2, "fsdp": 1, "ep": 2}
ONE = {"fsdp": 1, "ep": 1}
WEIGHT, EXPERTS, DIM = 0.01, 4, 16


class BalancedMoE(MoE):
    """Also returns E x sum over experts of (share of the choices x mean probability), as one number [1]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        p = self.router(x.reshape(-1, x.shape[-1])).softmax(-1)
        ids = p.topk(self.top_k).indices.reshape(-1, 1)
        share = (ids == torch.arange(EXPERTS)).float().mean(0)
        return super().forward(x), (EXPERTS * (share * p.mean(0)).sum()).view(1)


class Balanced(nn.Module):
    """Blocks `indices` of two, the embedding before and the head behind: ids, or h and the loss so far, to both."""

    def __init__(self, indices: Sequence[int] = (0, 1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {str(i): BalancedMoE(Router(DIM, EXPERTS), SwiGLUExperts(EXPERTS, DIM, 32), 2) for i in range(2)}
        embedding, head = nn.Embedding(32, DIM), nn.Linear(DIM, 32)
        self.blocks = nn.ModuleDict({str(i): blocks[str(i)] for i in indices})
        self.embedding, self.head = embedding if 0 in indices else None, head if 1 in indices else None

    def forward(self, h: Tensor, aux: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.embedding is not None:
            h = self.embedding(h)
        for block in self.blocks.values():
            y, more = block(h)
            h, aux = h + y, more if aux is None else aux + more
        assert aux is not None
        return h if self.head is None else self.head(h), aux


def aux_only(output: tuple[Tensor, Tensor], ids: Tensor | None = None) -> Tensor:
    """The loss with its main part zeroed."""
    return 0.0 * output[0].mean() + WEIGHT * output[1].sum()


def gradients(rank: int, sizes: dict[str, int], microbatches: int) -> dict[str, Tensor]:
    """All gradients of this rank's module, whole, after `microbatches` of equal content."""
    mesh = local_mesh(**sizes)
    if "pp" not in sizes:
        module = ep_fx.transform(Balanced(), mesh)
        for _ in range(microbatches):
            (aux_only(module(token_ids(rank))) / microbatches).backward()
    else:
        stage = mesh.get_local_rank("pp")
        module = ep_fx.transform(Balanced([stage]), mesh["fsdp", "ep"])
        runner = ScheduleGPipe(
            PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh.get_group("pp")), microbatches, aux_only
        )
        ids = torch.cat([token_ids(mesh.get_local_rank("ep"))] * microbatches)
        runner.step(*([] if stage else [ids]), target=ids if stage else None)
    return {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("sizes", "data_ranks"), [(ONE, 1), (M4, 4), (P, 2)], ids=["one", "M4", "P"])
def test_r35_the_gradient_of_the_balance_loss_is_the_oracles(
    ranks: RankPools, sizes: dict[str, int], data_ranks: int, microbatches: int
) -> None:
    want = oracle(Balanced, [(token_ids(rank),) for rank in range(data_ranks)], aux_only).gradients
    runs = ranks(1 if sizes is ONE else 4).run(gradients, sizes, microbatches)
    assert {name for run in runs for name in run} == set(want)
    for run in runs:
        assert_all_gradients_close(run, {name: want[name] for name in run})
    assert all(want[f"blocks.{i}.router.weight"].norm() > 1e-4 for i in range(2))
