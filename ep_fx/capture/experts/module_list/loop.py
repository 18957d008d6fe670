"""What a loop over experts computes, as data, and the one call of the dialect that computes the same.

    y = sum over k of weight[t,k] * expert[id[t,k]](x[t])                 order "after"
    y = sum over k of expert[id[t,k]](weight[t,k] * x[t])                 order "before"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ep_fx.capture.experts.module_list.source import CALL
from ep_fx.ops.moe import moe

Order = Literal["after", "before"]
ORDERS: tuple[Order, ...] = ("after", "before")


@dataclass(frozen=True)
class Loop:
    """What one window computes.

    Args:
        site, start, end: statements of the method, see `Method.replaced`.
        x, ids, weights: names of the tokens, of the expert ids, and of the weights or None.
        order: where the weights are applied.
        one_choice: ids are [T], not [T, K].
        by_expert: weights are [T, E], not [T, K].
        target: name of the result.
        adds: whether it is added to what `target` was.
        shape: expression for the shape of the result.
        dtype: dtype of the result where it is not that of the tokens.
    """

    site: int
    start: int
    end: int
    x: str
    ids: str
    weights: str | None
    order: Order
    one_choice: bool
    by_expert: bool
    target: str
    adds: bool
    shape: str
    dtype: torch.dtype | None = None

    def text(self, module: str) -> str:
        """The statement in place of the window, in a method whose first argument is called `module`."""
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        how = f"{self.order!r}, {self.one_choice}, {self.by_expert}, {self.shape}, {dtype!r}"
        call = f"{module}.{CALL}({self.x}, {self.ids}, {self.weights}, {how})"
        return f"{self.target} = {self.target} + {call}" if self.adds else f"{self.target} = {call}"


def call_of(experts_fn: Callable[[Tensor, Tensor], Tensor], num_experts: int) -> Callable[..., Tensor]:
    """The function that stands in place of a loop; its arguments are those of `Loop.text`."""

    def call(
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        order: Order,
        one_choice: bool,
        by_expert: bool,
        shape: Any,
        dtype: str | None,
    ) -> Tensor:
        y = _layer(x, ids, weights, order, one_choice, by_expert, experts_fn, num_experts)
        return (y if dtype is None else y.to(getattr(torch, dtype))).reshape(shape)

    return call


def _layer(
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    order: Order,
    one_choice: bool,
    by_expert: bool,
    experts_fn: Callable[[Tensor, Tensor], Tensor],
    num_experts: int,
) -> Tensor:
    """Tokens [.., D] through their experts, [T, D]; ids [.., K], or [..] for one choice a token."""
    dim, top_k = x.shape[-1], 1 if one_choice else ids.shape[-1]
    x, ids = x.reshape(-1, dim), ids.reshape(-1, top_k)
    if weights is None:
        chosen = torch.ones(ids.shape, dtype=x.dtype, device=x.device)
    elif by_expert:
        chosen = weights.reshape(-1, num_experts).gather(1, ids.long())
    else:
        chosen = weights.reshape(-1, top_k)
    if order == "after":
        return moe(x, ids, chosen, experts_fn, num_experts)
    rows = (x.unsqueeze(1) * chosen.unsqueeze(-1).to(x.dtype)).reshape(-1, dim)
    flat = ids.reshape(-1, 1)
    ones = torch.ones(flat.shape, dtype=x.dtype, device=x.device)
    return moe(rows, flat, ones, experts_fn, num_experts).reshape(-1, top_k, dim).sum(1)
