"""Form 3: a ModuleList of identical experts, and a parent whose forward routes tokens to them in a Python loop.

The loop depends on data and cannot be traced; nor is it. `proof` finds out on a small copy what the parent computes,
and shows it on many routings; `lists` puts the experts' parameters into stacks; here the loop is replaced for the time
of a capture by one call of the dialect. What is not proven is left alone and refused.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ep_fx.capture.experts.base import Cut, Experts, cut_by_name, where
from ep_fx.capture.experts.module_list.lists import Recognised, Stacking, stack_lists
from ep_fx.capture.experts.module_list.loop import call_of
from ep_fx.capture.experts.module_list.source import CALL
from ep_fx.capture.experts.module_list.stacked import Stack, StackedExperts, fold, unfold
from ep_fx.ops.moe import region

__all__ = ["ModuleLists", "Stack", "StackedExperts", "Stacking", "fold", "stack_lists", "unfold"]


class ModuleLists:
    """Recognises what `stack_lists` proved."""

    name = "module_list"
    form = (
        "a ModuleList of identical experts, where the parent's forward is proven on trials to send each token to its "
        "top-k experts and add up their weighted answers"
    )

    def accepts(self, module: nn.Module) -> bool:
        """Whether `module` stands for a list of experts with a proven parent."""
        return isinstance(module, StackedExperts) and hasattr(module, "recognised")

    def num_experts(self, module: nn.Module) -> int:
        """The length of the list."""
        return len(module)  # type: ignore[arg-type]

    def cut(self, module: nn.Module, name: str) -> Cut | None:
        """By the names of the experts' linears, see `cut_by_name`."""
        return cut_by_name(name)

    @contextmanager
    def install(self, experts: Sequence[Experts]) -> Iterator[None]:
        """Replaces the loops in the parents' methods until the end."""
        try:
            for item in experts:
                recognised: Recognised = item.module.recognised  # type: ignore[assignment]
                for name, method in _methods(item, recognised).items():
                    object.__setattr__(recognised.parent, name, method)
            yield
        finally:
            for item in experts:
                recognised = item.module.recognised  # type: ignore[assignment]
                for name in (*recognised.proof.methods, "forward", CALL):
                    recognised.parent.__dict__.pop(name, None)


def _methods(item: Experts, recognised: Recognised) -> dict[str, Callable[..., Any]]:
    parent, proof = recognised.parent, recognised.proof
    bound = {name: types.MethodType(method, parent) for name, method in proof.methods.items()}
    return {**bound, "forward": _checked(item, recognised, bound.get("forward", parent.forward)), CALL: _call(item)}


def _call(item: Experts) -> Callable[..., torch.Tensor]:
    def call(*args: Any) -> torch.Tensor:
        with region(item.path, item.ep, item.num_experts, item.tp):
            return call_of(item.module, item.num_experts)(*args)

    return call


def _checked(item: Experts, recognised: Recognised, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, for inputs of the form for which the loop was proven."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tokens = given[0] if len(given) == 1 else None
        if not isinstance(tokens, torch.Tensor) or tokens.dim() not in recognised.proof.ranks:
            shape = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else f"{len(given)} arguments"
            raise ValueError(
                f"{item.path} ({where(recognised.parent)}): this MoE layer was proven for one tensor of tokens with "
                f"{sorted(recognised.proof.ranks)} dimensions, and is called with {shape}; register its class with "
                "ep_fx.register_experts(cls, fn)"
            )
        return forward(*args, **kwargs)

    return call
