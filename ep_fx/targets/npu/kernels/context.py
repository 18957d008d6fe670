"""The context of a lowered exchange on the NPU: as the dialect's, with the expert of each row in place of an order.

`npu_moe_token_permute` sorts by expert itself; its ``sorted_indices`` serve everything that follows.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ep_fx.ops.context import exchange_splits
from ep_fx.targets.npu.kernels.registry import composition


class DispatchContext(NamedTuple):
    """What one dispatch leaves to its combine; see `ep_fx.DispatchContext`.

    Args:
        expert_ids: ``[R]``, int32, local expert of each row as the rows arrive, by source rank, then expert.
        input_splits: rows sent to each rank.
        output_splits: rows received from each rank.
        input_shape: ``(num_rows,)``, rows before dispatch, those that no expert takes included.
        tokens_per_expert: ``[E/ep]``, int64, rows received for each local expert.
    """

    expert_ids: Tensor
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    input_shape: tuple[int, ...]
    tokens_per_expert: Tensor


@composition
def dispatch_context(
    tokens_per_expert: Tensor, counts_done: Tensor, num_rows: int, ep_size: int, region: str
) -> DispatchContext:
    """The context of one dispatch; the only place where a region waits for the device.

    Arguments and errors as of the dialect's `ep_fx.dispatch_context`.
    """
    received = counts_done.view(ep_size, -1)
    input_splits, output_splits = exchange_splits(tokens_per_expert, received, num_rows, region)
    local = torch.arange(received.shape[1], dtype=torch.int32, device=received.device)
    expert_ids = local.repeat(ep_size).repeat_interleave(received.reshape(-1), output_size=sum(output_splits))
    return DispatchContext(expert_ids, input_splits, output_splits, (num_rows,), received.sum(0))


dispatch_context.results = DispatchContext._fields  # type: ignore[attr-defined]
