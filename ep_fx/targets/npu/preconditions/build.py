"""The words that the table is written in: conditions on dtypes, ranks, sizes and values of arguments.

A place is the name of an argument; ``x[0]`` is the first tensor of a list. A condition on an argument that is None
says nothing, but for `given`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_fx.targets.npu.preconditions.condition import Arguments, Condition, Look, Seen

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
_FALL_BACK = "leave it to ATen"


class Size(NamedTuple):
    """A number of a call's arguments.

    Args:
        text: what it is called.
        of: finds it; None where there is no such argument.
    """

    text: str
    of: Callable[[Arguments], Any]


def place(arguments: Arguments, name: str) -> Any:
    """The argument `name`, or the item of a list; None where there is none."""
    name, _, index = name.partition("[")
    value = arguments.get(name)
    if not index:
        return value
    position = int(index.rstrip("]"))
    return value[position] if isinstance(value, (list, tuple)) and position < len(value) else None


def shape_text(tensor: Tensor) -> str:
    """``bfloat16[4, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# -- numbers -----------------------------------------------------------------------------------------------------------
def dim(name: str, index: int) -> Size:
    """Size of one dimension of a tensor; None where it has fewer."""

    def of(arguments: Arguments) -> Any:
        tensor = place(arguments, name)
        if not isinstance(tensor, Tensor) or not -tensor.dim() <= index < tensor.dim():
            return None
        return tensor.shape[index]

    return Size(f"{name}.shape[{index}]", of)


def numel(name: str) -> Size:
    """Number of elements of a tensor."""

    def of(arguments: Arguments) -> Any:
        tensor = place(arguments, name)
        return tensor.numel() if isinstance(tensor, Tensor) else None

    return Size(f"{name}.numel()", of)


def count(name: str) -> Size:
    """Length of a list."""

    def of(arguments: Arguments) -> Any:
        value = place(arguments, name)
        return len(value) if isinstance(value, (list, tuple)) else None

    return Size(f"len({name})", of)


def number(name: str) -> Size:
    """An argument that is a number."""
    return Size(name, partial(place, name=name))


def product(left: Size, right: Size) -> Size:
    """Of two numbers."""

    def of(arguments: Arguments) -> Any:
        a, b = left.of(arguments), right.of(arguments)
        return None if a is None or b is None else a * b

    return Size(f"{left.text} * {right.text}", of)


# -- conditions --------------------------------------------------------------------------------------------------------
class Words(NamedTuple):
    """The conditions of one source.

    Args:
        source: where all that they say stands.
    """

    source: str

    def given(self, name: str, why: str) -> Condition:
        """The argument is not left to its default."""

        def look(arguments: Arguments) -> Seen:
            value = arguments.get(name)
            return Seen(value is not None, "None" if value is None else "it")

        return self._condition(name, f"stated explicitly, {why}", look, f"pass {name}")

    def absent(self, *names: str) -> Condition:
        """None of these arguments is given."""

        def look(arguments: Arguments) -> Seen:
            there = [name for name in names if place(arguments, name) is not None]
            return Seen(not there, ", ".join(there) or "none of them")

        return self._condition(", ".join(names), "None", look, "leave them out")

    def value(self, name: str, *allowed: Any) -> Condition:
        """The argument is one of `allowed`."""

        def look(arguments: Arguments) -> Seen | None:
            if (value := arguments.get(name)) is None:
                return None
            return Seen(any(value is a or (type(value) is type(a) and value == a) for a in allowed), repr(value))

        choice = " or ".join(repr(a) for a in allowed)
        return self._condition(name, choice, look, f"pass {choice}")

    def dtype(self, name: str, *allowed: torch.dtype, remedy: str = "") -> Condition:
        """The dtype of a tensor."""
        choice = " or ".join(str(a) for a in allowed)

        def look(arguments: Arguments) -> Seen | None:
            tensor = place(arguments, name)
            return Seen(tensor.dtype in allowed, str(tensor.dtype)) if isinstance(tensor, Tensor) else None

        return self._condition(name, choice, look, remedy or f"convert it to {choice}, or {_FALL_BACK}")

    def same_dtype(self, name: str, other: str, remedy: str = "") -> Condition:
        """Two tensors have one dtype."""

        def look(arguments: Arguments) -> Seen | None:
            a, b = place(arguments, name), place(arguments, other)
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                return None
            return Seen(a.dtype is b.dtype, f"{a.dtype}, {other} has {b.dtype}")

        return self._condition(name, f"the dtype of {other}", look, remedy or f"convert one, or {_FALL_BACK}")

    def rank(self, name: str, *allowed: int) -> Condition:
        """Number of dimensions of a tensor."""

        def look(arguments: Arguments) -> Seen | None:
            tensor = place(arguments, name)
            return Seen(tensor.dim() in allowed, f"{tensor.dim()}-D, {shape_text(tensor)}") if _is(tensor) else None

        choice = " or ".join(f"{a}-D" for a in allowed) if len(allowed) < 4 else f"{allowed[0]}-D to {allowed[-1]}-D"
        return self._condition(name, choice, look, "reshape it, or " + _FALL_BACK)

    def at_most(self, size: Size, limit: int, unit: str) -> Condition:
        """An upper limit that may be reached."""
        return self._limit(size, f"at most {limit} {unit}", limit, unit, lambda value: value <= limit)

    def below(self, size: Size, limit: int, unit: str) -> Condition:
        """An upper limit that may not be reached."""
        return self._limit(size, f"below {limit} {unit}", limit, unit, lambda value: value < limit)

    def at_least(self, size: Size, limit: int, unit: str) -> Condition:
        """A lower limit that may be reached."""
        return self._limit(size, f"at least {limit} {unit}", limit, unit, lambda value: value >= limit)

    def multiple(self, size: Size, of: int, unit: str) -> Condition:
        """A number that can be divided."""
        wants = f"an even number of {unit}" if of == 2 else f"a multiple of {of} {unit}"
        return self._limit(size, wants, of, unit, lambda value: value % of == 0)

    def equal(self, size: Size, other: Size, why: str, remedy: str = "") -> Condition:
        """Two numbers are the same; the second may be a constant of the operator."""

        def look(arguments: Arguments) -> Seen | None:
            a, b = size.of(arguments), other.of(arguments)
            return None if a is None or b is None else Seen(a == b, f"{size.text} = {a}, {other.text} = {b}")

        return self._condition(_name(size), f"{why}, {size.text} == {other.text}", look, remedy or _FALL_BACK)

    def that(self, name: str, wants: str, look: Look, remedy: str) -> Condition:
        """Anything else."""
        return self._condition(name, wants, look, remedy)

    def _limit(self, size: Size, wants: str, limit: int, unit: str, holds: Callable[[Any], Any]) -> Condition:
        def look(arguments: Arguments) -> Seen | None:
            value = size.of(arguments)
            return None if value is None else Seen(holds(value), f"{size.text} = {value}")

        return Condition(_name(size), wants, limit, unit, self.source, _FALL_BACK, look)

    def _condition(self, name: str, wants: str, look: Look, remedy: str) -> Condition:
        return Condition(name, wants, None, "", self.source, remedy, look)


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _name(size: Size) -> str:
    return size.text.removeprefix("len(").removeprefix("sum(").partition(".")[0].partition(" ")[0].rstrip(")")


class Op(NamedTuple):
    """One operator of the table.

    Args:
        name: in the namespace ``npu``.
        parameters: the names of its arguments in the order of its schema, as text; ``name=value`` has a default that
            is not None.
        conditions: on its arguments.
    """

    name: str
    parameters: str
    conditions: Sequence[Condition]

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name.

        Raises:
            TypeError: an argument that the operator does not have, or one given twice.
        """
        words = [word.partition("=") for word in self.parameters.split()]
        names = [name for name, _, _ in words]
        unknown = [name for name in kwargs if name not in names or name in names[: len(args)]]
        if unknown or len(args) > len(names):
            raise TypeError(f"npu.{self.name}({', '.join(names)}) does not take {unknown or f'{len(args)} arguments'}")
        defaults = {name: _DEFAULTS[value] for name, equals, value in words if equals}
        return {**dict.fromkeys(names), **defaults, **dict(zip(names, args, strict=False)), **kwargs}


_DEFAULTS = {"False": False, "True": True, "0": 0, "1": 1, "2": 2, "-1": -1, "half": "half", "()": (), "1.": 1.0}
