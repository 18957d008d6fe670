"""`moe`: the explicit form of an MoE layer, eager in plain PyTorch and a dispatch / combine region under capture."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, cast

import torch


class _Region(NamedTuple):
    name: str
    ep_size: int
    num_experts: int | None
    calls: list[int]
    tp_size: int = 1


_EAGER = _Region("eager", 1, None, [])
_CURRENT: ContextVar[_Region | None] = ContextVar("ep_fx_region", default=None)


@contextmanager
def region(name: str, ep_size: int, num_experts: int, tp_size: int = 1) -> Iterator[None]:
    """While open, `moe` belongs to the experts called `name`, split over `ep_size` ranks, each cut over `tp_size`.

    Raises:
        ValueError: `moe` was not called exactly once.
    """
    calls: list[int] = []
    token = _CURRENT.set(_Region(name, ep_size, num_experts, calls, tp_size))
    try:
        yield
        if len(calls) != 1:
            raise ValueError(
                f"{name}: the function given to ep_fx.register_experts must call ep_fx.moe once, it called it "
                f"{len(calls)} times; without it every rank would use its own experts only"
            )
    finally:
        _CURRENT.reset(token)


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_experts: int,
) -> torch.Tensor:
    """Sends each token to its experts and adds up their weighted answers.

    Args:
        x: tokens [T, D].
        topk_ids: experts of each token [T, K], integers; `num_experts` means "no expert".
        topk_weights: weight of each choice [T, K].
        experts_fn: ``(rows [R, D] in expert order, tokens_per_expert [E_local]) -> [R, D]``, row by row.
        num_experts: number of experts over all ranks.

    Returns:
        [T, D] in the dtype of `x`.

    Raises:
        ValueError: shapes that do not fit, or another `num_experts` than the module's.
    """
    name, ep_size, declared, calls, tp_size = _CURRENT.get() or _EAGER
    if x.dim() != 2 or topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape:
        raise ValueError(
            f"moe: expected x [T, D], topk_ids and topk_weights [T, K], got {tuple(x.shape)}, {tuple(topk_ids.shape)} "
            f"and {tuple(topk_weights.shape)}"
        )
    if declared is not None and declared != num_experts:
        raise ValueError(f"{name}: moe was called with num_experts {num_experts}, the module has {declared}")
    if declared is not None:
        calls.append(num_experts)
    ops = torch.ops.ep_fx
    rows, counts, order = ops.permute(x, topk_ids, num_experts)
    routed, _, counts, indices, splits = ops.dispatch(rows, counts, None, ep_size, name)
    if tp_size == 1:
        routed_output = experts_fn(routed, counts)
    else:
        partial = experts_fn(ops.tp_share(routed, tp_size, name), counts)
        routed_output = ops.tp_sum(partial, tp_size, name)
    back = ops.combine(routed_output, indices, splits, rows.shape[0], name)
    return cast(torch.Tensor, ops.unpermute(back, order, topk_weights))
