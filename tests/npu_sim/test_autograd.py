"""Backward through torch_npu's own formulas, over our references of the kernels that they call, equals plain torch."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.npu_sim.calls import HIDDEN, TOKENS, TOP_K, choices

F = torch.nn.functional
Inputs = tuple[Tensor, ...]
Formula = Callable[..., Tensor]


def _permute_npu(tokens: Tensor, chosen: Tensor) -> Tensor:
    permuted: Tensor = torch.ops.npu.npu_moe_token_permute(tokens, chosen)[0]
    return permuted


def _permute(tokens: Tensor, chosen: Tensor) -> Tensor:
    return tokens.repeat_interleave(TOP_K, 0)[torch.argsort(chosen.flatten(), stable=True)]


def _unpermute_npu(rows: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    order = torch.ops.npu.npu_moe_token_permute(rows[:TOKENS].detach(), chosen)[1]
    out: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, order, probs)
    return out


def _unpermute(rows: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    order = torch.argsort(chosen.flatten(), stable=True)
    whole = torch.zeros_like(rows).index_copy(0, order, rows).view(TOKENS, TOP_K, HIDDEN)
    return (whole * probs.unsqueeze(-1)).sum(1)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _attention_npu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    out: Tensor = torch.ops.npu.npu_fusion_attention(query, key, value, 4, "BNSD", atten_mask=mask, scale=0.3)[0]
    return out


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, ~mask, scale=0.3, enable_gqa=True)


CASES: dict[str, tuple[Formula, Formula, Callable[[], Inputs]]] = {
    "permute": (_permute_npu, _permute, lambda: (torch.randn(TOKENS, HIDDEN), choices())),
    "unpermute": (
        _unpermute_npu, _unpermute,
        lambda: (torch.randn(TOKENS * TOP_K, HIDDEN), torch.rand(TOKENS, TOP_K), choices()),
    ),
    "swiglu": (lambda x: torch.ops.npu.npu_swiglu(x), _swiglu, lambda: (torch.randn(TOKENS, HIDDEN),)),
    "rms_norm": (
        lambda x, gamma: torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)[0],
        lambda x, gamma: F.rms_norm(x, (HIDDEN,), gamma, 1e-5),
        lambda: (torch.randn(TOKENS, HIDDEN), torch.rand(HIDDEN)),
    ),
    "rotary_mul": (
        lambda x, cos, sin: torch.ops.npu.npu_rotary_mul(x, cos, sin), _rotary,
        lambda: (torch.randn(2, 3, 4, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)),
    ),
    "fusion_attention": (
        _attention_npu, _attention,
        lambda: (
            torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8),
            torch.ones(5, 5, dtype=torch.bool).triu(1),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case: str) -> None:
    torch.manual_seed(0)
    on_npu, plain, make = CASES[case]
    results = []
    made = make()
    for formula, device in ((on_npu, "npu"), (plain, "cpu")):
        inputs = [value.clone().to(device) for value in made]
        leaves = [value.requires_grad_() for value in inputs if value.is_floating_point()]
        out = formula(*inputs)
        weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).to(device) / out.numel()
        results.append([out, *torch.autograd.grad(out, leaves, weights)])
    for got, wanted in zip(*results, strict=True):
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-6)
