"""A list of identical experts as one module with stacked parameters, ``experts.3.w1 [F, D] -> experts.w1 [E, F, D]``.

Each stack is one parameter with one layout, so an optimizer, a clipped norm and a distributed checkpoint treat it as
any other. The names that the list had are kept beside it, and `state_dict`s go both ways (see `Stack`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ep_fx.capture.experts.module_list.rows import RowsOfExperts


@dataclass
class Stack:
    """One stacked parameter.

    Args:
        names: what the parameter of each expert was called in the model, by expert.
        parts: these parameters, until `take`.
    """

    names: tuple[str, ...]
    parts: list[nn.Parameter] = field(repr=False)

    def take(self) -> Tensor:
        """The parameters of all experts as one tensor [E, ...]; they are let go of."""
        stacked = torch.stack([part.detach() for part in self.parts])
        self.parts.clear()
        return stacked


class StackedExperts(nn.Module):
    """Takes the place of the list: ``experts(rows [R, D] in expert order, tokens_per_expert [E_local]) -> [R, D]``.

    Its submodules and parameters are named as in one expert, the parameters being stacks on the meta device at first.

    Args:
        experts: the list; it is not changed.
        where: module path and source line, for messages.
    """

    def __init__(self, experts: Sequence[nn.Module], where: str) -> None:
        super().__init__()
        first = experts[0]
        memo: dict[int, Any] = {}
        for parameter in first.parameters():
            empty = torch.empty((len(experts), *parameter.shape), dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        one = copy.deepcopy(first, memo)
        self._parameters, self._modules = one._parameters, one._modules  # the same dicts: what is swapped here is there
        self._buffers = one._buffers
        self.training = one.training
        object.__setattr__(self, "_one", one)
        object.__setattr__(self, "_number", len(experts))
        object.__setattr__(self, "_where", where)

    def __len__(self) -> int:
        """The number of experts over all ranks."""
        return cast(int, self._number)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Rows through their experts, in the forward of one expert.

        Raises:
            ValueError: that forward does to a parameter what cannot be done for many experts at once.
        """
        one = cast(nn.Module, self._one)
        one.training = self.training
        with RowsOfExperts(list(self.parameters()), tokens_per_expert):
            return cast(Tensor, one(rows))

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self._where}: an expert is called by its number outside what was recognised as the loop over experts; "
            "register the class around it with ep_fx.register_experts(cls, fn)"
        )


def difference(experts: Sequence[nn.Module]) -> str | None:
    """Why `experts` cannot be one module with stacked parameters, in words; None: they can."""
    first = experts[0]
    shapes = _signature(first)
    seen: set[int] = set()
    for number, expert in enumerate(experts):
        if type(expert) is not type(first) or repr(expert) != repr(first):
            return f"experts 0 and {number} are different modules: {type(first).__name__}, {type(expert).__name__}"
        if _signature(expert) != shapes:
            return f"experts 0 and {number} have parameters of different shape, dtype or requires_grad"
        if next(expert.buffers(), None) is not None:
            return f"expert {number} has buffers"
        if seen & (own := {id(p) for p in expert.parameters()}):
            return f"expert {number} shares a parameter with another one"
        seen |= own
        if name := _attribute(first, expert):
            return f"experts 0 and {number} differ in {name!r}, which their forward reads"
        if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in expert.modules()):
            return f"expert {number} has hooks"
    return None if shapes else "the experts have no parameters"


def _signature(expert: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in expert.named_parameters()}


def _attribute(first: nn.Module, other: nn.Module) -> str | None:
    """The first plain attribute that differs and that the class's methods read."""
    for a, b in zip(first.modules(), other.modules(), strict=True):
        read = _names_read(type(a))
        for name in a.__dict__.keys() | b.__dict__.keys():
            one, two = a.__dict__.get(name), b.__dict__.get(name)
            if name in _OF_EVERY_MODULE or one is two or name not in read:
                continue
            if isinstance(one, (int, float, str, bool, tuple, type(None))) and one == two:
                continue
            return name
    return None


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def _names_read(cls: type) -> set[str]:
    methods = [f for name, f in inspect.getmembers(cls, inspect.isfunction) if not hasattr(nn.Module, name)]
    codes = [f.__code__ for f in (*methods, cls.forward)]  # type: ignore[attr-defined]
    return {name for code in codes for name in code.co_names}


def fold(state: dict[str, Any], stacks: Mapping[str, Stack], prefix: str) -> None:
    """In `state`, full tensors under the names of single experts become one tensor under the name of their stack."""
    for name, stack in stacks.items():
        keys = [prefix + key for key in stack.names]
        if all(key in state for key in keys):
            state[prefix + name] = torch.stack([state.pop(key) for key in keys])


def unfold(state: Mapping[str, Tensor], stacks: Mapping[str, Stack]) -> dict[str, Tensor]:
    """`state` with every stack taken apart into its experts, under the names that the model had for them."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        names = stacks[name].names if name in stacks else (name,)
        result.update(zip(names, value.unbind(0) if name in stacks else (value,), strict=True))
    return result
