"""One call and more of each kernel that we have a reference of, on the CPU, small and unbalanced."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ep_fx.testing.npu.reference import REFERENCES

TOKENS, HIDDEN, TOP_K, EXPERTS, INNER = 12, 8, 2, 4, 6


@dataclass(frozen=True)
class Call:
    """Arguments of the kernel `name`; `case` tells apart the calls of one kernel."""

    name: str
    case: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-{self.case}"


def calls(dtype: torch.dtype) -> list[Call]:
    """All calls, with floats in `dtype`."""
    torch.manual_seed(0)
    return [*_routing(dtype), *_matmul(dtype), *_pointwise(dtype), *_attention(dtype)]


def choices() -> Tensor:
    """The experts of each token, ``[TOKENS, TOP_K]`` int32; the last expert is never chosen."""
    chosen = [torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(TOKENS)]
    return torch.stack(chosen).to(torch.int32)


def _routing(dtype: torch.dtype) -> list[Call]:
    tokens, chosen, rows = torch.randn(TOKENS, HIDDEN, dtype=dtype), choices(), TOKENS * TOP_K
    probs = torch.rand(TOKENS, TOP_K, dtype=dtype)
    permuted, order = REFERENCES["npu_moe_token_permute"](tokens, chosen)
    single, single_order = REFERENCES["npu_moe_token_permute"](tokens, chosen[:, 0].contiguous())
    permute, unpermute = "npu_moe_token_permute", "npu_moe_token_unpermute"
    cut = [(str(count), (tokens, chosen, count)) for count in (0, 10, -3, 999)]
    return [
        Call(permute, "two choices", (tokens, chosen)),
        Call(permute, "one choice", (tokens, chosen[:, 0].contiguous())),
        *[Call(permute, f"{count} rows", arguments) for count, arguments in cut],
        Call(f"{permute}_grad_v2", "two choices", (permuted, order, TOKENS, dtype, TOP_K)),
        Call(f"{permute}_grad_v2", "one choice", (single, single_order, TOKENS, dtype, 1)),
        Call(unpermute, "weights", (permuted, order, probs)),
        Call(unpermute, "no weights", (permuted, order)),
        Call(f"{unpermute}_grad_v2", "weights", (tokens, order, rows, dtype, probs, False, None, permuted)),
        Call(f"{unpermute}_grad_v2", "no weights", (permuted, order, rows, dtype)),
    ]


def _matmul(dtype: torch.dtype) -> list[Call]:
    rows = TOKENS * TOP_K
    x, grad = torch.randn(rows, HIDDEN, dtype=dtype), torch.randn(rows, INNER, dtype=dtype)
    weight = torch.randn(EXPERTS, HIDDEN, INNER, dtype=dtype)
    sizes = torch.bincount(choices().flatten().long(), minlength=EXPERTS)
    name, one = "npu_grouped_matmul", {"split_item": 3}
    kinds = {"sizes": {"group_list": sizes, "group_list_type": 1}, "totals": {"group_list": sizes.cumsum(0)}}
    found = []
    for kind, groups in kinds.items():
        found += [
            Call(name, f"rows, {kind}", ([x], [weight]), {**one, **groups, "group_type": 0}),
            Call(name, f"gradient of x, {kind}", ([grad], [weight.mT]), {**one, **groups, "group_type": 0}),
            Call(name, f"gradient of weights, {kind}", ([x.t()], [grad]), {**one, **groups, "group_type": 2}),
        ]
    if dtype is not torch.float32:
        total = torch.ones(EXPERTS, HIDDEN, INNER)
        found.append(Call("npu_grouped_matmul_add_", "totals", (total, x, grad, sizes.cumsum(0))))
    return found


def _pointwise(dtype: torch.dtype) -> list[Call]:
    x, gamma = torch.randn(TOKENS, HIDDEN, dtype=dtype), torch.rand(HIDDEN, dtype=dtype)
    y, rstd = REFERENCES["npu_rms_norm"](x, gamma)
    heads, angle = torch.randn(2, 3, 4, 8, dtype=dtype), torch.randn(1, 3, 1, 8, dtype=dtype)
    return [
        Call("npu_swiglu", "halves", (x,)),
        Call("npu_swiglu_backward", "halves", (x[:, : HIDDEN // 2], x)),
        Call("npu_rms_norm", "rows", (x, gamma)),
        Call("npu_rms_norm", "epsilon", (x, gamma, 1e-5)),
        Call("npu_rms_norm_backward", "rows", (y, x, gamma, rstd)),
        Call("npu_rotary_mul", "half", (heads, angle, angle)),
        Call("npu_rotary_mul", "interleave", (heads, angle, angle, "interleave")),
        Call("npu_rotary_mul_backward", "half", (heads, heads, angle, angle)),
    ]


def _attention(dtype: torch.dtype) -> list[Call]:
    query, dy = (torch.randn(2, 4, 5, 8, dtype=dtype) for _ in range(2))
    key, value = (torch.randn(2, 2, 5, 8, dtype=dtype) for _ in range(2))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    options = {"atten_mask": mask, "scale": 0.3}
    out, largest, total, *_ = REFERENCES["npu_fusion_attention"](query, key, value, 4, "BNSD", **options)
    saved = {"softmax_max": largest, "softmax_sum": total, "attention_in": out, "atten_mask": mask, "scale_value": 0.3}
    return [
        Call("npu_fusion_attention", "causal", (query, key, value, 4, "BNSD"), options),
        Call("npu_fusion_attention", "whole", (query, key, value, 4, "BNSD")),
        Call("npu_fusion_attention_grad", "causal", (query, key, value, dy, 4, "BNSD"), saved),
    ]
