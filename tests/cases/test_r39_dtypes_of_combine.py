"""R39, combine in fp32 meets expert output in bf16.

Sources: pytorch/torchtitan PR#3567, InternLM/xtuner PR#1121.
A sum into an fp32 buffer refuses bf16 rows, or the sum is kept in bf16 and loses what is small. Here the output has
the dtype of the tokens, and the sum over a token's experts is kept in fp32 (fp64 stays) whatever that is: 1 and eight
times 2**-10 are 1.0078125, the next bf16 number after 1, while a sum kept in bf16 never leaves 1.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.custom import Routed
from tests.cases.hand import M4
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, oracle, relative_error

SMALL = 2.0**-10
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def sums(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """A token's sum over two and over nine experts, of which the first gives 1 and the others 2**-10."""
    module = ep_fx.transform(Routed([1.0] + [SMALL] * 11, dtype), local_mesh(**M4))
    x = torch.ones(4, 8, dtype=dtype)
    return [module(x, torch.arange(k).expand(4, k), torch.ones(4, k)).detach() for k in (2, 9)]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_r39_the_sum_over_experts_is_kept_in_fp32(ranks: RankPools, dtype: torch.dtype) -> None:
    two = 1.0 if dtype is torch.bfloat16 else 1.0009765625
    for run in ranks(4).run(sums, dtype):
        for y, expected in zip(run, (two, 1.0078125), strict=True):
            assert y.dtype is dtype
            assert y.eq(expected).all()


def twice(rank: int, dtype: torch.dtype) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Logits and whole gradients of two equal runs."""
    module, ids, found = ep_fx.transform(TinyMoE().to(dtype), local_mesh(**M4)), token_ids(rank), []
    for _ in range(2):
        module.zero_grad()
        logits = module(ids)
        next_token_loss(logits, ids).backward()
        gradients = {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[union-attr]
        found.append((logits.detach(), gradients))
    return found


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float64))]
)
def test_r39_a_model_with_a_router_in_fp32_keeps_its_dtype_and_repeats_bit_for_bit(
    ranks: RankPools, dtype: torch.dtype
) -> None:
    batches = [(token_ids(rank),) for rank in range(4)]
    want = oracle(lambda: TinyMoE().double(), batches, next_token_loss, batches)
    for (first, second), expected in zip(ranks(4).run(twice, dtype), want.outputs, strict=True):
        assert first[0].dtype is dtype
        assert relative_error(first[0], expected) <= TOLERANCES[dtype]
        assert_all_gradients_close(first[1], want.gradients, tol=TOLERANCES[dtype])
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(gradient, second[1][name]) for name, gradient in first[1].items())
