"""The gradients of a styled module are those of the mean over `ep` of each rank's loss.

    split over ep (experts)     holds the sum over ep, the exchange brought the tokens    -> divided by ep
    not split (router, ...)     holds this rank's loss only                               -> averaged over ep

A mean over more ranks, such as FSDP's, may follow: means of means over groups of equal size. A parameter that FSDP
averages over a group which contains the ep group is left alone. Averaging happens on each new gradient before it is
accumulated, or, under FSDP, on the whole of the accumulated shard: earlier micro-batches are equal on all ranks by
then, and a mean of equal values is the value.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ep_fx.styles import _fsdp

_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Outermost FSDP modules in which every gradient is known to be reduced over ``ep``."""


def scaled_gradient(parameter: Tensor, factor: float) -> Tensor:
    """`parameter` as it is; its gradient times `factor`."""
    return cast(Tensor, _Scaled.apply(parameter, factor))  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _Average:
    """Hook on a parameter or its gradient: the mean over the ranks of a group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def of_gradient(self, grad: Tensor) -> Tensor:
        """For `Tensor.register_hook`: replaces a gradient before it is accumulated."""
        mean = grad.clone(memory_format=torch.contiguous_format)
        self._average(mean)
        return mean

    def of_parameter(self, parameter: Tensor) -> None:
        """For FSDP, which reduces and accumulates first and then calls the sharded parameter's hooks."""
        if parameter.grad is not None:
            self._average(parameter.grad)

    def _average(self, grad: Tensor) -> None:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        dist.all_reduce(local, group=self.group)
        local.div_(self.group.size())


def average_dense(module: nn.Module, split: frozenset[str], group: Any) -> None:
    """Sees to it that the gradients of the parameters of `module` that are not `split` are averaged over `group`.

    To be called in forward, when it is known how FSDP holds them; what it registers stays with the parameter, once.
    """
    ranks = dist.get_process_group_ranks(group)
    for owner, leaf, parameter in _dense(module, split):
        sharded = _fsdp.find(owner, leaf)
        if sharded is not None and _fsdp.reduces_over(sharded, ranks):
            continue
        if sharded is not None:
            _once(sharded.sharded_param, "_post_accumulate_grad_hooks", group)
        elif parameter.requires_grad:
            _once(parameter, "_backward_hooks", group)


def _dense(module: nn.Module, split: frozenset[str]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for path, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            if (f"{path}.{leaf}" if path else leaf) not in split:
                yield owner, leaf, parameter


def _once(parameter: nn.Parameter, kind: str, group: Any) -> None:
    hooks = (getattr(parameter, kind, None) or {}).values()
    if any(isinstance(getattr(hook, "__self__", None), _Average) for hook in hooks):
        return
    average = _Average(group)
    if kind == "_backward_hooks":
        parameter.register_hook(average.of_gradient)
    else:
        parameter.register_post_accumulate_grad_hook(average.of_parameter)


def check_fsdp(where: str, experts: nn.Module, group: Any, style_of: Callable[[nn.Module], Any]) -> None:
    """Checks, once for a model and when gradients are wanted, that FSDP and the style together reduce each gradient.

    Args:
        where: the experts and their style, for messages.
        group: ranks along ``ep``.
        style_of: the style of a module, None where it has none.

    Raises:
        ValueError: the experts' gradients would be divided twice, or parameters of the model outside of what the style
            was given are not reduced over ``ep``.
    """
    unit = _fsdp.unit_of(experts) if torch.is_grad_enabled() else None
    if unit is None:
        return
    if unit.divide_factor is not None:
        raise ValueError(
            f"{where}: set_gradient_divide_factor({unit.divide_factor:g}) on the FSDP unit of these experts would "
            "divide their gradients twice; leave it out, the style divides by the size of 'ep' and FSDP by its own"
        )
    if unit.root in _CHECKED:
        return
    ranks = dist.get_process_group_ranks(group)
    averaged = {part for owner in unit.root.modules() if style_of(owner) is not None for part in owner.modules()}
    missing = [
        name
        for owner, name, parameter in unit.members()
        if owner not in averaged and parameter.sharded_param.requires_grad and not _fsdp.reduces_over(parameter, ranks)
    ]
    if missing:
        raise ValueError(
            f"{where}: the gradients of {len(missing)} parameters outside of what the style was applied to, "
            f"{missing[:4]}, would be those of one 'ep' rank: fully_shard does not average them over ranks {ranks}. "
            "Apply the style to the whole MoE, or shard them over fsdp x ep: fully_shard(..., "
            "mesh=mesh['fsdp', 'ep']._flatten('data'))"
        )
    _CHECKED.add(unit.root)
