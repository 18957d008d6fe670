"""R40, precision of the router, and ties.

Sources: sgl-project/sglang#39351, PrimeIntellect-ai/prime-rl PR#2952, databricks/megablocks#91,
pytorch/torchtitan#1246.
A blanket cast to bf16 makes logits of 1 and 1.001 equal, so a token's expert is chosen by its number; weights or their
gradients lose what bf16 cannot hold; and ties fall otherwise in the graph than in eager mode. A router in fp32 must
stay so in a bf16 model: parameter, product, choice, gradient and its reduction.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import CollectiveLog, RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.hand_moe import HandExperts, HandMoE, tokens_for
from tests.models.moe import MoE
from tests.models.tiny_moe import Router, TinyMoE, next_token_loss, token_ids

NEAR = 1.001
TOKENS = 6


def near_ties() -> MoE:
    """A bf16 layer with a router in fp32: tokens for e prefer expert e to the others by a thousandth."""
    model = MoE(Router(8, 4), HandExperts(), 1).bfloat16()
    model.router.weight = nn.Parameter(torch.ones(4, 8) + (NEAR - 1) * torch.eye(4, 8))
    return model


def choices(rank: int) -> list[float]:
    """The factor of the expert that each of four tokens got, and then of the same tokens in other order."""
    module = ep_fx.transform(near_ties(), local_mesh(**M4))
    y = [module(tokens_for(order).bfloat16()).sum(-1) for order in ([0, 1, 2, 3], [3, 2, 1, 0])]
    return [float(value) for value in torch.cat(y).detach()]


def test_r40_logits_that_are_equal_in_bf16_choose_as_fp32_says(ranks: RankPools) -> None:
    assert torch.tensor(1.0).bfloat16() == torch.tensor(NEAR).bfloat16()
    assert ranks(4).run(choices) == [[1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0]] * 4


def in_bf16(rank: int) -> dict[str, Any]:
    """TinyMoE in bf16, its routers in fp32: what became of the router's weight and its gradient."""
    model = TinyMoE(blocks=1)
    exact = model.blocks[0].moe.router.weight.detach().clone()
    model.bfloat16().blocks[0].moe.router.weight = nn.Parameter(exact)
    module, ids = ep_fx.transform(model, local_mesh(**M4)), token_ids(rank)
    with CollectiveLog() as log:
        next_token_loss(module(ids), ids).backward()
    weight: Any = module.get_parameter("blocks.0.moe.router.weight")
    gradient = weight.grad.full_tensor()
    return {
        "dtypes": (weight.dtype, gradient.dtype),
        "exact": torch.equal(weight.full_tensor(), exact),
        "gradient": gradient,
        "moved": [e.dtype for e in log.of("reduce_scatter_tensor_coalesced") if (4, 16) in e.shapes],
    }


def test_r40_a_router_in_fp32_keeps_its_parameter_and_its_gradient_in_fp32(ranks: RankPools) -> None:
    for found in ranks(4).run(in_bf16):
        assert found["dtypes"] == (torch.float32, torch.float32)
        assert found["exact"]
        assert found["moved"] == [torch.float32]
        assert (found["gradient"] != found["gradient"].bfloat16().float()).float().mean() > 0.5


class Counting(HandMoE):
    """HandMoE without any preference, that counts whom it chose."""

    def __init__(self) -> None:
        super().__init__(top_k=2)
        nn.init.zeros_(self.router.weight)
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        scores, ids, number = super().route(tokens)
        self.count.add_((ids.view(-1, 1) == torch.arange(4)).sum(0))
        return scores, ids, number


def ties(rank: int) -> tuple[list[int], list[int], bool]:
    """Counts of the graph's choices and of eager's, and whether outputs are equal."""
    module, eager, x = ep_fx.transform(Counting(), local_mesh(**M4)), Counting(), tokens_for([rank] * TOKENS)
    y, want = module(x), eager(x)
    y.sum().backward()
    return module.count.tolist(), eager.count.tolist(), torch.equal(y, want)


def test_r40_a_router_without_preference_chooses_two_experts_for_all_as_eager_does(ranks: RankPools) -> None:
    for counts, eager, equal in ranks(4).run(ties):
        assert sorted(counts) == [0, 0, TOKENS, TOKENS]
        assert counts == eager
        assert equal
