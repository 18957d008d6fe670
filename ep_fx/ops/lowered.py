"""The parts of a lowered exchange around its all_to_all: choose the rows, put them in expert order, and back.

    send_rows -> all_to_all_single -> wait_tensor -> regroup           (dispatch, combine_backward)
    ungroup   -> all_to_all_single -> wait_tensor -> pad_rows          (combine, dispatch_backward)

Results are contiguous, as the exchange demands; a contiguous argument that already is the result is returned as it is.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_fx.ops.library import register


def _regroup(x: Tensor, permuted_indices: Tensor) -> Tensor:
    return x.index_select(0, permuted_indices)


def _regroup_fake(x: Tensor, permuted_indices: Tensor) -> Tensor:
    return x.new_empty([permuted_indices.shape[0], *x.shape[1:]])


def _ungroup(x: Tensor, permuted_indices: Tensor) -> Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    result[permuted_indices] = x
    return result


def _ungroup_fake(x: Tensor, permuted_indices: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _send_rows(x: Tensor, splits: Sequence[int]) -> Tensor:
    return x.narrow(0, 0, sum(splits)).contiguous()


def _send_rows_fake(x: Tensor, splits: Sequence[int]) -> Tensor:
    return x.new_empty([sum(splits), *x.shape[1:]])


def _pad_rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    if shape[0] == x.shape[0]:
        return x.contiguous()
    result = x.new_empty((shape[0], *x.shape[1:]))
    result[: x.shape[0]] = x
    result[x.shape[0] :] = 0
    return result


def _pad_rows_fake(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty([shape[0], *x.shape[1:]])


register("regroup(Tensor x, Tensor permuted_indices) -> Tensor", _regroup, _regroup_fake)
register("ungroup(Tensor x, Tensor permuted_indices) -> Tensor", _ungroup, _ungroup_fake)
register("send_rows(Tensor(a) x, SymInt[] splits) -> Tensor(a)", _send_rows, _send_rows_fake)
register("pad_rows(Tensor(a) x, SymInt[] shape) -> Tensor(a)", _pad_rows, _pad_rows_fake)
