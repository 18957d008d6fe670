"""npu_grouped_matmul, not quantised: each group of rows times a weight of its own, or its outer product; and the
product of gradients that is added to what is there."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ACC = torch.float32


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **unsupported: Any,
) -> list[Tensor]:
    """[OPP] npu_grouped_matmul.md, [META]: ``y_i = x_i @ weight_i + bias_i``, sums in fp32.

        group_type 0    rows are grouped: x ``[M, K]``, weight ``[G, K, N]``, y ``[M, N]``
        group_type 2    the summed dimension is: x ``[M, K]``, a transposed view, weight ``[K, N]``, y ``[G, M, N]``

    Args:
        bias: ``[G, N]``.
        group_list: ``[G]`` int64; running totals (`group_list_type` 0) or sizes (1), which sum to the rows.
        split_item: 2 or 3: one output, in a list.

    Raises:
        NotImplementedError: what the product does not emit: lists of several tensors, quantised forms, activations.
    """
    named = [name for name, value in unsupported.items() if value is not None]
    if named or act_type or len(x) != 1 or len(weight) != 1 or group_list is None or split_item not in (2, 3):
        raise NotImplementedError(f"one x, one weight, a group_list and split_item 2 or 3 are computed; got {named}")
    sizes = group_sizes(group_list, group_list_type)
    if group_type == 2:
        pairs = zip(x[0].to(ACC).split(sizes, 1), weight[0].to(ACC).split(sizes, 0), strict=True)
        return [torch.stack([left @ right for left, right in pairs]).to(x[0].dtype)]
    if group_type != 0:
        raise NotImplementedError(f"group_type {group_type}: 0 and 2 are computed")
    blocks = zip(x[0].to(ACC).split(sizes, 0), weight[0].to(ACC).unbind(0), strict=True)
    y = torch.cat([rows @ matrix for rows, matrix in blocks])
    if bias:
        y = y + bias[0].to(ACC).repeat_interleave(torch.tensor(sizes), 0)
    return [y.to(x[0].dtype)]


def npu_grouped_matmul_add_(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """[DOC]: ``input_i += x_i.T @ weight_i``, in place, where the rows of `x` and `weight` are grouped.

    Args:
        input: ``[G, M, N]`` fp32.
        x, weight: ``[K, M]`` and ``[K, N]``, fp16 or bf16.

    Raises:
        NotImplementedError: another layout than this one, which is all that the operator takes.
    """
    if not transpose_x or transpose_weight or group_type != 2:
        raise NotImplementedError("transpose_x, no transpose_weight and group_type 2 are computed")
    sizes = group_sizes(group_list, group_list_type)
    pairs = zip(x.to(ACC).split(sizes), weight.to(ACC).split(sizes), strict=True)
    return input.add_(torch.stack([left.t() @ right for left, right in pairs]))


def group_sizes(group_list: Tensor, group_list_type: int | None) -> list[int]:
    """Rows of each group: [OPP] `group_list_type` 0 is running totals, 1 is sizes."""
    values: list[int] = group_list.tolist()
    if group_list_type == 1:
        return values
    return [end - start for start, end in zip([0, *values], values, strict=False)]
