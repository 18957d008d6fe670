"""Grouped products: the rows of each expert times that expert's matrix, or the outer products of its rows.

    group_type 0    y[rows of e] = x[rows of e] @ weight[e] (+ bias[e])        x [R, K], weight [E, K, N]
    group_type 2    y[e] = x[:, rows of e] @ weight[rows of e]                 x [M, R], weight [R, N], y [E, M, N]

Counts are int64 sizes on the device: nobody waits for them. The kernel demands that they add up to R; `rest_counted`
and `rest_appended` make a group of zeros of the rows that no expert has.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ep_fx.ops.grouped_mm import bias_gradient, row_biases
from ep_fx.targets.npu.kernels.registry import call, composition, is_empty, kernel

TOTALS, SIZES, ONE_TENSOR = 0, 1, 3
"""group_list holds running totals, or sizes; the result is one tensor."""


def _product_fake(
    x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None = None, group_type: int = 0
) -> Tensor:
    rows = (x.shape[0],) if group_type == 0 else (group_list.shape[0], x.shape[0])
    return x.new_empty((*rows, weight.shape[-1]))


@kernel(fake=_product_fake)
def npu_grouped_matmul(
    x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None = None, group_type: int = 0
) -> Tensor:
    """The products of all groups.

    Args:
        x: fp16, bf16 or fp32; for group_type 2 the transposed view of rows.
        weight: in the dtype of `x`, may be a transposed view.
        group_list: ``[E]`` rows of each group, which add up to R.
        bias: ``[E, N]``; added in fp32 to bf16 products.

    Returns:
        In the dtype of `x`, zeros where there are no rows.
    """
    if is_empty(x):
        return _product_fake(x, weight, group_list, bias, group_type).zero_()
    if group_type == 2:
        x, weight = x.mT.contiguous().mT, weight.contiguous()
    else:
        x, weight = x.contiguous(), _matrices(weight)
    biases = None if bias is None else [(bias.float() if bias.dtype == torch.bfloat16 else bias).contiguous()]
    products = call(
        "npu_grouped_matmul", [x], [weight], bias=biases, group_list=group_list.to(torch.int64).contiguous(),
        split_item=ONE_TENSOR, group_type=group_type, group_list_type=SIZES,
    )  # fmt: skip
    result: Tensor = products[0]
    return result


def _sums_fake(x: Tensor, weight: Tensor, group_list: Tensor) -> Tensor:
    return x.new_empty((group_list.shape[0], x.shape[1], weight.shape[1]), dtype=torch.float32)


@kernel(fake=_sums_fake)
def npu_grouped_matmul_add_(x: Tensor, weight: Tensor, group_list: Tensor) -> Tensor:
    """The outer products of each group's rows, ``x_e.T @ weight_e``, added up and kept in fp32.

    The operator writes to a tensor that is made here, so nothing that others see is written.

    Args:
        x, weight: ``[R, M]`` and ``[R, N]``, fp16 or bf16.
        group_list: ``[E]`` rows of each group, which add up to R. The operator gets running totals: where it falls
            back to its first version, it takes nothing else, whatever the kind that is stated.

    Returns:
        ``[E, M, N]``, fp32; zeros where there are no rows.
    """
    total = _sums_fake(x, weight, group_list).zero_()
    if is_empty(x):
        return total
    ends = group_list.to(torch.int64).cumsum(0)
    result: Tensor = call(
        "npu_grouped_matmul_add_", total, x.contiguous(), weight.contiguous(), ends, transpose_x=True,
        transpose_weight=False, group_type=2, group_list_type=TOTALS,
    )  # fmt: skip
    return result


def _matrices(weight: Tensor) -> Tensor:
    """`weight` itself where each matrix is contiguous or the transposed view of one that is, else a copy."""
    return weight if weight.is_contiguous() or weight.mT.is_contiguous() else weight.contiguous()


@composition
def rest_counted(group_list: Tensor, x: Tensor) -> Tensor:
    """`group_list` and one more size: that of the rows of `x` behind the last group's."""
    counts = group_list.to(torch.int64)
    return torch.cat((counts, (x.shape[0] - counts.sum()).reshape(1)))


@composition
def rest_appended(each: Tensor) -> Tensor:
    """`each` with zeros for one more group."""
    return torch.cat((each, each.new_zeros((1, *each.shape[1:]))))


@composition
def add_bias(rows: Tensor, bias: Tensor, group_list: Tensor) -> Tensor:
    """`rows` plus the bias of their expert; as the dialect's, but for the assertion, which would run on the CPU."""
    return row_biases(bias, group_list.cumsum(0), rows.shape[0]).to(rows.dtype).add(rows)


@composition
def bias_grad(grad: Tensor, group_list: Tensor) -> Tensor:
    """Gradient ``[E, N]`` of the biases: sums of the rows of each expert, kept in fp32."""
    return bias_gradient(grad, group_list.cumsum(0))
