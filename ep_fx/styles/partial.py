"""Experts of which every rank along `tp` holds a part: where rows enter them, and where partial outputs are added up.

    x = enter(x)             forward: nothing                        backward: gradients are summed over tp
    y = leave(partial)       forward: partial outputs are summed     backward: nothing

The ranks along `tp` hold the same rows, so each sum gives them all the same result.
"""
from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh


def enter(x: Tensor, scores: Tensor | None, device_mesh: DeviceMesh) -> tuple[Tensor, Tensor | None]:
    """`x` and `scores` as they are; their gradients, of which every rank has a part, are summed over ``tp``."""
    found = _Enter.apply(x, scores, device_mesh.get_group("tp"))  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor | None]", found)


def leave(partial: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """The sum of `partial` over ``tp``; the gradient goes to every rank as it is."""
    return cast(Tensor, _Leave.apply(partial, device_mesh.get_group("tp")))  # type: ignore[no-untyped-call]


def _summed(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.detach()  # the backend may hold `total` for a while, and must not hold the graph with it


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor | None, group: Any) -> tuple[Tensor, Tensor | None]:
        ctx.group = group
        return x.view_as(x), None if scores is None else scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [
            _summed(g, ctx.group) if needed and g is not None else None
            for g, needed in zip((grad, grad_scores), ctx.needs_input_grad[:2], strict=True)
        ]
        return *found, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Any) -> Tensor:
        return _summed(partial, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
