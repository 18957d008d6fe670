"""Kernels of the dialect's operators on npu tensors, for code that runs eagerly: the parallel styles, `ep_fx.nn`.

An operator keeps its meaning, its formula of autograd included, and so its backward is an operator with a kernel here.
``permuted_indices`` is the inverse of torch_npu's ``sorted_indices``, so each use turns it round: one scatter of
integers. A call that a kernel does not take (its dtype, its sizes) goes to the dialect's own kernel.

Nobody waits for the device, so rows that no expert has are not counted here: the last group takes them, and what comes
of them is set to zero. Ids are not checked, as the assertion would run on the CPU.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ep_fx.ops.library import KERNELS
from ep_fx.targets.npu.kernels import matmul, routing
from ep_fx.targets.npu.kernels.registry import Call, asked_first
from ep_fx.targets.npu.preconditions import check

_OWN: dict[str, Callable[..., Any]] = {}


class _RefusedError(Exception):
    """A kernel does not take its arguments."""


def kernels() -> Mapping[str, Callable[..., Any]]:
    """The kernels by the names of the dialect's operators."""
    return {name: _or_dialect(KERNELS[name], own) for name, own in _OWN.items()}


def _enter(function: Callable[..., Any]) -> Callable[..., Any]:
    _OWN[function.__name__] = function
    return function


def _or_dialect(dialect: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with asked_first(_refuse):
                return own(*args, **kwargs)
        except _RefusedError:
            return dialect(*args, **kwargs)

    return run


def _refuse(call: Call) -> None:
    reason = check(call.op, call.args, call.kwargs).reason
    if reason is not None:
        raise _RefusedError(reason)


def _inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation ``[n]`` of any integers, in int32."""
    places = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter(0, order.to(torch.int64), places)


# -- routing -----------------------------------------------------------------------------------------------------------
@_enter
def permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, order = routing.npu_moe_token_permute(x, topk_ids)
    return rows, routing.tokens_per_expert(topk_ids, num_experts), _inverse(order).to(torch.int64)


@_enter
def permute_backward(grad: Tensor, permuted_indices: Tensor, num_tokens: int, top_k: int) -> Tensor:
    return routing.npu_moe_token_permute_grad_v2(grad, _inverse(permuted_indices), num_tokens, top_k)


@_enter
def unpermute(rows: Tensor, permuted_indices: Tensor, topk_weights: Tensor) -> Tensor:
    return routing.npu_moe_token_unpermute(rows, _inverse(permuted_indices), topk_weights)


@_enter
def unpermute_backward(
    grad: Tensor, rows: Tensor, permuted_indices: Tensor, topk_weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    return routing.npu_moe_token_unpermute_grad_v2(grad, _inverse(permuted_indices), topk_weights, rows)


@_enter
def regroup(x: Tensor, permuted_indices: Tensor) -> Tensor:
    """A row for each index: what unpermuting without weights does."""
    return routing.npu_moe_token_unpermute(x, permuted_indices.to(torch.int32))


@_enter
def ungroup(x: Tensor, permuted_indices: Tensor) -> Tensor:
    """Each row to its index: the backward of `regroup`."""
    return routing.npu_moe_token_unpermute_grad_v2(x, permuted_indices.to(torch.int32))[0]


# -- grouped products --------------------------------------------------------------------------------------------------
def _groups(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sizes of the groups, the last with the rows that nobody counts, and which rows these are, ``[rows, 1]``."""
    sizes = counts.to(torch.int64)
    total = sizes.sum()
    groups = torch.cat((sizes[:-1], (sizes[-1] + rows - total).reshape(1)))
    return groups, (torch.arange(rows, device=counts.device) >= total).unsqueeze(1)


@_enter
def grouped_mm(x: Tensor, weight: Tensor, tokens_per_expert: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    groups, rest = _groups(tokens_per_expert, x.shape[0])
    y = matmul.npu_grouped_matmul(x, weight.mT if transposed else weight, groups, bias)
    return y.masked_fill(rest, 0)


@_enter
def grouped_mm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, tokens_per_expert: Tensor, has_bias: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    groups, rest = _groups(tokens_per_expert, x.shape[0])
    grad, x = grad.masked_fill(rest, 0), x.masked_fill(rest, 0)
    grad_x = matmul.npu_grouped_matmul(grad, weight if transposed else weight.mT, groups)
    left, right = (grad, x) if transposed else (x, grad)
    grad_weight = matmul.npu_grouped_matmul(left.t(), right, groups, None, 2)
    return grad_x, grad_weight, matmul.bias_grad(grad, groups) if has_bias else grad.new_empty(0)
