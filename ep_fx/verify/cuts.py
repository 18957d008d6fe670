"""What the ranks along `tp` hold of a value: all of it, a cut of its features, or a summand of it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Cut:
    """Each rank has its part of dimension `dim`: one piece of each of `blocks` runs that stand behind each other."""

    dim: int
    blocks: int = 1


class Summand(Enum):
    """The sum over the ranks is the value."""

    SUMMAND = "summand"


State = Cut | Summand | None
"""None: every rank has the whole value."""
SUMMAND = Summand.SUMMAND


class NotKnownError(ValueError):
    """An operator that what the ranks hold must not meet; the message says what would be right."""


def state_of(states: dict[fx.Node, Any], value: Any) -> State:
    """What the ranks hold of one argument.

    Raises:
        NotKnownError: it is a list.
    """
    found = states.get(value) if isinstance(value, fx.Node) else None
    if isinstance(found, tuple):
        raise NotKnownError("the elements of this list, one by one")
    return found


def shape_of(value: Any) -> Sequence[Any]:
    """The recorded shape of a value; of the first of a list.

    Raises:
        NotKnownError: none is recorded.
    """
    fake = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(fake, (list, tuple)):
        fake = fake[0] if fake else None
    if not isinstance(fake, torch.Tensor):
        raise NotKnownError("values of recorded shape")
    return fake.shape


def is_data(value: Any) -> bool:
    """Whether a node holds numbers, rather than indices, masks, counts or sizes."""
    fake = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(fake, torch.Tensor) and fake.dtype.is_floating_point
