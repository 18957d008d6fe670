"""R12, clipping across dense and expert parameters: an error, or a wrong norm.

Sources: pytorch/pytorch#180346, NVIDIA/Megatron-LM PR#6489 and PR#5916, DeepSpeed PR#8478, hpcaitech/ColossalAI#2192,
sgl-project/SpecForge PR#882, NovaSky-AI/SkyRL PR#1370.
Norms of parameters on two meshes cannot be stacked, and reductions made at home count some experts twice or never, or
a replicated gradient once per rank: the norm would differ from sqrt(2 + 1.875), or between ranks. A rank that alone
finds it infinite skips the step, and the others wait for it. Here all parameters are on one mesh, so the stock function
is right and has one verdict.
"""
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4, M4E, M8H
from tests.models.hand_moe import HandMoE, hand_loss, tokens_for

FSDP4 = {"fsdp": 4, "ep": 1}
TOTAL, EXPERTS = math.sqrt(2 + 1.875), math.sqrt(2)


class Scaled(nn.Module):
    """HandMoE and a dense scale of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.scale = HandMoE(), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x) * self.scale


def _number(norm: Any) -> float:
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def clipped(rank: int, sizes: dict[str, int], foreach: bool) -> tuple[float, float, list[float]]:
    """Total norm as stock clipping returns it, the experts' own, and their shares after clipping at 1."""
    module = ep_fx.transform(Scaled(), local_mesh(**sizes))
    hand_loss(module(tokens_for([0, 1, 2, 3]))).backward()
    weight: Any = module.get_parameter("moe.experts.w")
    own = torch.nn.utils.get_total_norm([weight.grad], foreach=foreach)
    total = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=foreach)
    gradient = weight.grad.full_tensor()
    return _number(total), _number(own), [float(gradient[e, e, 0]) for e in range(4)]


def verdicts(rank: int, sizes: dict[str, int], where: int) -> tuple[float, str, bool]:
    """One entry of one rank's part of the experts' gradient is infinite.

    Returns:
        The norm, what clipping said, and whether it left this rank's gradients as they were.
    """
    module = ep_fx.transform(Scaled(), local_mesh(**sizes))
    hand_loss(module(tokens_for([0, 1, 2, 3]))).backward()
    gradients: list[Any] = [p.grad for p in module.parameters()]
    if rank == where:
        module.get_parameter("moe.experts.w").grad.to_local().view(-1)[0] = math.inf  # type: ignore[union-attr, attr-defined]
    before = [g.to_local().clone() for g in gradients]
    norm, said = _number(torch.nn.utils.get_total_norm(gradients)), "nothing"
    try:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        said = str(error)
    return norm, said, all(torch.equal(b, g.to_local()) for b, g in zip(before, gradients, strict=True))


@pytest.mark.parametrize(
    ("sizes", "foreach"),
    [
        *((sizes, foreach) for sizes in (M4, M4E, FSDP4) for foreach in (True, False)),
        *(pytest.param(M8H, foreach, marks=pytest.mark.slow) for foreach in (True, False)),
    ],
    ids=str,
)
def test_r12_stock_clipping_gives_the_norm_over_dense_and_expert_gradients_together(
    ranks: RankPools, sizes: dict[str, int], foreach: bool
) -> None:
    runs = ranks(math.prod(sizes.values())).run(clipped, sizes, foreach)
    for total, own, shares in runs:
        assert total == pytest.approx(TOTAL, abs=1e-5)
        assert own == pytest.approx(EXPERTS, abs=1e-5)
        assert shares == pytest.approx([0.127000] * 4, abs=1e-5)
    assert len({total for total, _, _ in runs}) == 1


@pytest.mark.parametrize("sizes", [pytest.param(M4, marks=pytest.mark.slow), M4E], ids=["M4", "M4e"])
def test_r12_one_ranks_infinity_has_the_same_verdict_on_every_rank(ranks: RankPools, sizes: dict[str, int]) -> None:
    for norm, said, untouched in ranks(4).run(verdicts, sizes, 2):
        assert norm == math.inf
        assert "non-finite" in said
        assert untouched
