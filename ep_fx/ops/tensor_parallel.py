"""Experts cut over `tp`: where rows enter them, and where their partial outputs are added up, as single nodes.

    x = tp_share(rows)           forward: the same rows            backward: the sum over tp of the gradients
    y = tp_sum(partial)          forward: the sum over tp          backward: the same gradient

Each is the other's backward. The kernels serve one rank; more ranks need the tensor-parallel pass. A bias of the last
product is no partial sum: `add_bias` adds it behind the sum, once, and every rank has its whole gradient. No result
shares memory with an argument.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_fx.ops.grouped_mm import bias_gradient, row_biases, row_offsets
from ep_fx.ops.library import register


def _kernel(x: Tensor, tp_size: int, region: str) -> Tensor:
    if tp_size != 1:
        raise RuntimeError(
            f"experts of region {region!r} are cut over {tp_size} ranks: lower them by the tensor-parallel pass"
        )
    return x.clone(memory_format=torch.contiguous_format)


def _fake(x: Tensor, tp_size: int, region: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.tp_size, ctx.region = inputs


def _share_formula(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.ep_fx.tp_sum(grad, ctx.tp_size, ctx.region), None, None


def _sum_formula(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.ep_fx.tp_share(grad, ctx.tp_size, ctx.region), None, None


def _add_bias(rows: Tensor, bias: Tensor, tokens_per_expert: Tensor) -> Tensor:
    count = rows.shape[0]
    return row_biases(bias, row_offsets(tokens_per_expert, count), count).to(rows.dtype).add_(rows)


def _add_bias_fake(rows: Tensor, bias: Tensor, tokens_per_expert: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


def _add_bias_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, bias, tokens_per_expert = inputs
    ctx.dtype = bias.dtype
    ctx.save_for_backward(tokens_per_expert)


def _add_bias_formula(ctx: Any, grad: Tensor) -> Any:
    (tokens_per_expert,) = ctx.saved_tensors
    return grad, torch.ops.ep_fx.add_bias_backward(grad, tokens_per_expert).to(ctx.dtype), None


def _add_bias_backward(grad: Tensor, tokens_per_expert: Tensor) -> Tensor:
    return bias_gradient(grad, row_offsets(tokens_per_expert, grad.shape[0]))


def _add_bias_backward_fake(grad: Tensor, tokens_per_expert: Tensor) -> Tensor:
    return grad.new_empty([tokens_per_expert.shape[0], grad.shape[1]])


register(
    "tp_share(Tensor x, int tp_size, str region) -> Tensor",
    _kernel, _fake, setup_context=_setup, backward=_share_formula,
)
register(
    "tp_sum(Tensor partial, int tp_size, str region) -> Tensor",
    _kernel, _fake, setup_context=_setup, backward=_sum_formula,
)
register(
    "add_bias(Tensor rows, Tensor bias, Tensor tokens_per_expert) -> Tensor",
    _add_bias, _add_bias_fake, setup_context=_add_bias_setup, backward=_add_bias_formula,
)
register(
    "add_bias_backward(Tensor grad, Tensor tokens_per_expert) -> Tensor", _add_bias_backward, _add_bias_backward_fake
)
