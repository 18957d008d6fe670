"""What capture knows about one experts module, and what a family of experts must offer.

A family recognises its modules and, for the time of one capture, makes their forward go through
``permute / dispatch / grouped_mm / combine / unpermute``; the model is as before when the capture ends.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import nn


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
    """

    path: str
    module: nn.Module
    family: str
    num_experts: int
    parameters: tuple[str, ...]
    ep: int


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

    def install(self, experts: Sequence[Experts]) -> AbstractContextManager[None]:
        """Routes the forward of `experts` through the dialect until the context ends."""
        ...


def where(module: nn.Module) -> str:
    """``file:line`` of the forward of `module`, for messages."""
    code = getattr(getattr(type(module).forward, "__wrapped__", type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "source unknown"
