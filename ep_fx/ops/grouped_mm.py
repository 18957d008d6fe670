"""grouped_mm: the rows of each expert times that expert's weight, in one call where torch has one.

    y[rows of e] = x[rows of e] @ weight[e] (+ bias[e])         weight [E,Din,Dout], or [E,Dout,Din] if transposed

`F.grouped_mm` for fp32, bf16 and fp16 with rows of a multiple of 16 bytes, one mm an expert otherwise. Rows behind the
last expert's are exactly 0 in the result and in the gradient of `x` (torch leaves them uninitialised). On an
accelerator the native path never waits for the device. The gradient of `weight` has its layout, with no transpose.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_fx.ops.library import accumulation_dtype, register

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16


def _check_dtypes(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype:
        raise TypeError(f"ep_fx.grouped_mm: x and weight need one dtype, got {x.dtype} and {weight.dtype}")


def _is_native(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's kernel takes these operands, in all three products of forward and backward."""
    widths = weight.shape[1:]
    if x.dtype not in _NATIVE_DTYPES or x.dtype != weight.dtype or 0 in (*widths, x.shape[0], weight.shape[0]):
        return False
    return all(width * x.element_size() % _ALIGNMENT == 0 for width in widths)


def _plain(operand: Tensor) -> Tensor:
    """`operand` itself if it is contiguous and begins on an aligned address, else a copy that is and does."""
    operand = operand.contiguous()
    return operand if operand.data_ptr() % _ALIGNMENT == 0 else operand.clone()


def row_offsets(tokens_per_expert: Tensor, rows: int) -> Tensor:
    """Index behind the last row of each expert; checked to lie within `rows`."""
    offsets = tokens_per_expert.cumsum(0)
    message = f"ep_fx.grouped_mm: tokens_per_expert counts more than the {rows} rows there are"
    if offsets.device.type != "cpu":
        torch._assert_async(offsets[-1] <= rows, message)
    elif offsets.numel() and int(offsets[-1]) > rows:
        raise ValueError(f"{message}, {int(offsets[-1])}")
    return offsets


def _clear_tail(y: Tensor, offsets: Tensor) -> Tensor:
    """Zeroes the rows of `y` behind the last expert's, in place."""
    if y.device.type == "cpu":
        y[int(offsets[-1]) :] = 0
        return y
    return y.masked_fill_((torch.arange(y.shape[0], device=y.device) >= offsets[-1]).unsqueeze(1), 0)


def _segments(offsets: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with them; waits for the device unless there are none at all."""
    start = 0
    for expert, end in enumerate(offsets.tolist() if rows else ()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _multiply(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """``x_e @ weight_e``, or ``x_e @ weight_e.T``; zeros behind the last row."""
    if _is_native(x, weight):
        weight = _plain(weight)
        product = F.grouped_mm(_plain(x), weight.mT if transposed else weight, offs=offsets.int())
        return _clear_tail(product, offsets)
    y = x.new_zeros((x.shape[0], weight.shape[1] if transposed else weight.shape[2]))
    for expert, rows in _segments(offsets, x.shape[0]):
        torch.mm(x[rows], weight[expert].mT if transposed else weight[expert], out=y[rows])
    return y


def _outer(left: Tensor, right: Tensor, offsets: Tensor, native: bool) -> Tensor:
    """``left_e.T @ right_e`` for every expert, zeros for an expert without rows."""
    if native:
        return F.grouped_mm(_plain(left).t(), _plain(right), offs=offsets.int())
    result = left.new_zeros((offsets.shape[0], left.shape[1], right.shape[1]))
    for expert, rows in _segments(offsets, left.shape[0]):
        torch.mm(left[rows].t(), right[rows], out=result[expert])
    return result


def _row_experts(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row; the number of experts for a row behind the last."""
    return torch.searchsorted(offsets, torch.arange(rows, device=offsets.device), right=True)


def _grouped_mm(x: Tensor, weight: Tensor, tokens_per_expert: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    _check_dtypes(x, weight)
    offsets = row_offsets(tokens_per_expert, x.shape[0])
    y = _multiply(x, weight, offsets, transposed)
    if bias is None:
        return y
    return y.add_(row_biases(bias, offsets, x.shape[0]))


def row_biases(bias: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The bias ``[rows, D]`` of each row; zeros behind the last expert's."""
    padded = torch.cat((bias, bias.new_zeros(1, bias.shape[1])))
    return padded.index_select(0, _row_experts(offsets, rows))


def _grouped_mm_fake(
    x: Tensor, weight: Tensor, tokens_per_expert: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    _check_dtypes(x, weight)
    return x.new_empty([x.shape[0], weight.shape[1] if transposed else weight.shape[2]])


def _grouped_mm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, tokens_per_expert, bias, ctx.transposed = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, tokens_per_expert)


def _grouped_mm_formula(ctx: Any, grad: Tensor) -> Any:
    grad_x, grad_weight, grad_bias = torch.ops.ep_fx.grouped_mm_backward(
        grad, *ctx.saved_tensors, ctx.has_bias, ctx.transposed
    )
    return grad_x, grad_weight, None, grad_bias if ctx.has_bias else None, None


def _grouped_mm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, tokens_per_expert: Tensor, has_bias: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    offsets = row_offsets(tokens_per_expert, x.shape[0])
    grad_x = _multiply(grad, weight, offsets, not transposed)
    left, right = (grad, x) if transposed else (x, grad)
    grad_weight = _outer(left, right, offsets, _is_native(x, weight))
    return grad_x, grad_weight, bias_gradient(grad, offsets) if has_bias else grad.new_empty(0)


def bias_gradient(grad: Tensor, offsets: Tensor) -> Tensor:
    """Gradient ``[E, D]`` of the biases of every expert's rows: the sums of the rows of `grad`, kept in fp32."""
    sums = grad.new_zeros((offsets.shape[0] + 1, grad.shape[1]), dtype=accumulation_dtype(grad))
    sums.index_add_(0, _row_experts(offsets, grad.shape[0]), grad.to(sums.dtype))
    return sums[:-1].to(grad.dtype, copy=True)


def _grouped_mm_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, tokens_per_expert: Tensor, has_bias: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width = weight.shape[1] if transposed else weight.shape[2]
    bias = grad.new_empty([weight.shape[0], width] if has_bias else [0])
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias


register(
    "grouped_mm(Tensor x, Tensor weight, Tensor tokens_per_expert, Tensor? bias, bool transposed) -> Tensor",
    _grouped_mm, _grouped_mm_fake, setup_context=_grouped_mm_setup, backward=_grouped_mm_formula,
)
register(
    "grouped_mm_backward(Tensor grad, Tensor x, Tensor weight, Tensor tokens_per_expert, bool has_bias, "
    "bool transposed) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    _grouped_mm_backward, _grouped_mm_backward_fake,
)


def _counts_of(offsets: Tensor) -> Tensor:
    return torch.diff(offsets.to(torch.int64), prepend=offsets.new_zeros(1, dtype=torch.int64))


def _counts_of_fake(offsets: Tensor) -> Tensor:
    return offsets.new_empty(offsets.shape, dtype=torch.int64)


register("counts_of(Tensor offsets) -> Tensor", _counts_of, _counts_of_fake)
