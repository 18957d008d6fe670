"""What capture knows about one experts module, and what a family of experts must offer.

A family recognises its modules and, for the time of one capture, makes their forward go through
``permute / dispatch / grouped_mm / combine / unpermute``; the model is as before when the capture ends.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn


class Cut(NamedTuple):
    """Where the hidden features of experts lie in a parameter ``[E, ...]``, so that ``tp`` can cut it.

    Args:
        dim: along which dimension.
        blocks: how many runs of hidden features stand behind each other there: 2 where one parameter is the gate's
            followed by the up-projection's. Each is cut.
        each: entries of one hidden feature that stand together: 2 where gate and up-projection are interleaved.
    """

    dim: int
    blocks: int = 1
    each: int = 1


_INTO = frozenset({"w1", "w3", "gate_proj", "up_proj"})
_OUT_OF = frozenset({"w2", "down_proj"})


def cut_by_name(name: str) -> Cut:
    """``w1, w3 [E, hidden, dim]`` along dim 1, ``w2 [E, dim, hidden]`` along dim 2; or weights of linears so called.

    Raises:
        KeyError: another name, or a bias of the last product.
    """
    *path, leaf = name.split(".")
    owner = path[-1] if leaf in ("weight", "bias") and path else leaf
    if owner in _INTO:
        return Cut(1)
    if owner in _OUT_OF and leaf != "bias":
        return Cut(2)
    raise KeyError(name)


@dataclass(frozen=True)
class Experts:
    """One recognised experts module.

    Args:
        path: module path.
        module: the module itself.
        family: name of the family that recognised it.
        num_experts: number of experts over all ranks.
        parameters: names of the parameters whose dim 0 counts the experts.
        ep: number of ranks the experts are split over; 1: not split.
        tp: number of ranks that each expert is cut over; 1: not cut.
        cuts: how ``tp`` cuts each of the parameters that it cuts, by name.
    """

    path: str
    module: nn.Module
    family: str
    num_experts: int
    parameters: tuple[str, ...]
    ep: int
    tp: int = 1
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, which every rank along ``tp`` holds, where it enters experts that are cut: its gradients add up."""
        return x if self.tp == 1 else cast(torch.Tensor, torch.ops.ep_fx.tp_share(x, self.tp, self.path))

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ``tp`` of what a part of every expert computes."""
        return partial if self.tp == 1 else cast(torch.Tensor, torch.ops.ep_fx.tp_sum(partial, self.tp, self.path))


class Family(Protocol):
    """A form in which people write experts."""

    name: str
    form: str

    def accepts(self, module: nn.Module) -> bool:
        """Whether `module` is written in this form."""
        ...

    def num_experts(self, module: nn.Module) -> int:
        """Number of experts in `module`."""
        ...

    def cut(self, module: nn.Module, name: str) -> Cut | None:
        """How ``tp`` cuts the parameter `name` of `module`; None: it is whole on every rank along ``tp``.

        Raises:
            KeyError: nothing is known of a parameter of this name.
        """
        ...

    def install(self, experts: Sequence[Experts]) -> AbstractContextManager[None]:
        """Routes the forward of `experts` through the dialect until the context ends."""
        ...


def where(module: nn.Module) -> str:
    """``file:line`` of the forward of `module`, for messages."""
    code = getattr(getattr(type(module).forward, "__wrapped__", type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "source unknown"
