"""Form 5: experts the user names himself, ``ep_fx.register_experts(cls, fn)`` with a body in terms of `ep_fx.moe`.

    def forward(module, x, ids, weights):
        return ep_fx.moe(x, ids, weights, lambda rows, counts: ..., num_experts=8)
    ep_fx.register_experts(MyExperts, forward)

In a class with a ModuleList of experts, ``module.experts`` is then one module, to be given to `ep_fx.moe` as it is.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ep_fx.capture.experts.base import Cut, Experts, cut_by_name
from ep_fx.capture.experts.module_list import StackedExperts
from ep_fx.capture.experts.transformers_others import BUILT_IN, Registration
from ep_fx.ops.moe import region

ExpertsForward = Callable[..., Any]
_REGISTERED: dict[type[nn.Module], Registration] = {}


def register_experts(
    cls: type[nn.Module], fn: ExpertsForward, *, parameters: Sequence[str] | None = None
) -> None:
    """Says how to trace every instance of `cls`: by ``fn(module, *args, **kwargs)``, which calls `ep_fx.moe` once.

    A ModuleList of identical modules under a name with "expert" becomes one module with stacked parameters
    (``experts.3.w1 -> experts.w1 [E, ...]``), which takes ``(rows, tokens_per_expert)``. So do the children of a class
    that is a ModuleList or a ModuleDict itself, as ``module.stacked``.

    Args:
        parameters: names, in the module, of the parameters that are split over ``ep`` on dim 0. None: the stacked ones;
            where there are none, those whose dim 0 equals ``module.num_experts`` (or, without that attribute, the dim 0
            of the first parameter).

    Raises:
        TypeError: `cls` is not a Module class.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_experts takes a torch.nn.Module class, got {cls!r}")
    _REGISTERED[cls] = Registration(fn, None if parameters is None else tuple(parameters))


def registration(module: nn.Module) -> Registration | None:
    """What is registered for the class of `module`, by the user or here."""
    cls = type(module)
    return _REGISTERED.get(cls) or BUILT_IN.get(f"{cls.__module__}.{cls.__qualname__}")


class Explicit:
    """Recognises instances of registered classes."""

    name = "explicit"
    form = "a class given to ep_fx.register_experts(cls, fn), with fn in terms of ep_fx.moe"

    def accepts(self, module: nn.Module) -> bool:
        """Whether the class was registered."""
        return registration(module) is not None

    def num_experts(self, module: nn.Module) -> int:
        """The length of its list of experts, else ``module.num_experts``, else dim 0 of the first parameter."""
        lists = [inner for inner in module.modules() if isinstance(inner, StackedExperts)]
        if lists:
            return len(lists[0])
        known = registration(module)
        number = None if known is None else getattr(module, known.count, None)
        return int(number if number is not None else next(module.parameters()).shape[0])

    def cut(self, module: nn.Module, name: str) -> Cut | None:
        """By name, see `cut_by_name`; those of transformers have layouts of their own, of which no name tells."""
        if type(module) not in _REGISTERED:
            raise KeyError(name)
        return cut_by_name(name)

    @contextmanager
    def install(self, experts: Sequence[Experts]) -> Iterator[None]:
        """Calls the registered function instead of forward until the end."""
        try:
            for item in experts:
                object.__setattr__(item.module, "forward", partial(_call, item))
            yield
        finally:
            for item in experts:
                item.module.__dict__.pop("forward", None)


def _call(experts: Experts, *args: Any, **kwargs: Any) -> Any:
    with region(experts.path, experts.ep, experts.num_experts, experts.tp):
        known = registration(experts.module)
        assert known is not None
        return known.forward(experts.module, *args, **kwargs)
