"""Types and sizes of fake values as short, stable text: ``f32[3, s0, 64]``, ``f32[64, s0]{1, 64}`` with its strides.

Symbols are renumbered by first appearance in the graph (``s0, s1, ..`` for sizes of inputs, ``u0, u1, ..`` for sizes
known only at run time), so the text depends neither on the process nor on how torch numbered them.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch import fx

SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}
_SPELLED_OUT = 3
"""A longer list is shown by its length: its elements have lines of their own. (The results of an operator, which are a
tuple, are few, and shown.)"""

Size: TypeAlias = int | sympy.Expr


def dtype_text(dtype: torch.dtype) -> str:
    """``f32`` for ``torch.float32``; the name without ``torch.`` where there is no short form."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def expression(size: Any) -> Size:
    """A dimension as an int or as a sympy expression."""
    return cast(Size, size.node.expr) if isinstance(size, torch.SymInt) else int(size)


def _natural(symbol: sympy.Symbol) -> tuple[str, int, str]:
    name = symbol.name
    match = re.fullmatch(r"(\D*)(\d+)", name)
    return (match[1], int(match[2]), name) if match else (name, 0, name)


class SymbolNames:
    """Stable names for the symbols of a graph, given out in order of first appearance.

    Args:
        nodes: the nodes, in order, whose values are numbered.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._counts = {"s": 0, "u": 0}
        self._texts: dict[Size, str] = {}
        self._strides: dict[tuple[Size, ...], str] = {}
        self._env: Any = None
        self.device: torch.device | None = None
        """Device of the first tensor."""
        for node in nodes:
            value = node.meta.get("val")
            self.type(value)
            if self.device is None and isinstance(value, torch.Tensor):
                self.device = value.device

    @property
    def hints(self) -> dict[str, int]:
        """The size with which each symbol of an input was traced; symbols that the trace found equal have the same."""
        known = self._env.backed_var_to_val if self._env is not None else {}
        return {str(new): int(known[old]) for old, new in self._names.items() if old in known}

    @property
    def inputs(self) -> dict[str, sympy.Symbol]:
        """The trace's symbol of each free size of the inputs, by its name in the text."""
        return {str(new): old for old, new in self._names.items() if str(new) in self.hints}

    def rename(self, size: Size) -> Size:
        """`size` with renumbered symbols."""
        if isinstance(size, int):
            return size
        for symbol in sorted(size.free_symbols, key=_natural):
            if symbol not in self._names:
                kind = "u" if str(symbol.name).startswith(("u", "zu")) else "s"
                name = sympy.Symbol(f"{kind}{self._counts[kind]}", integer=True, nonnegative=True)
                self._counts[kind] += 1
                self._names[symbol] = name
        return cast(Size, size.xreplace(self._names))

    def size(self, size: Any) -> str:
        """Text of one dimension."""
        if isinstance(size, torch.SymInt) and self._env is None:
            self._env = size.node.shape_env
        value = size if isinstance(size, sympy.Expr) else expression(size)
        if isinstance(value, int):
            return str(value)
        if value not in self._texts:
            self._texts[value] = str(self.rename(value))
        return self._texts[value]

    def type(self, value: Any, exact: bool = False) -> str:
        """Text of a value's type; empty for a value that is not known, or whose elements have names (a context).

        Args:
            exact: also strides where they are not a contiguous tensor's, and the device where it is not `device`.
        """
        if isinstance(value, torch.Tensor):
            text = f"{dtype_text(value.dtype)}[{', '.join(self.size(d) for d in value.shape)}]"
            return text + self._layout(value) if exact else text
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return str(value.node.pytype.__name__)
        if isinstance(value, (bool, int, float)):
            return str(value)
        if isinstance(value, list):
            texts = [self.type(item, exact) for item in value]
            return f"[{', '.join(texts)}]" if len(texts) <= _SPELLED_OUT else f"list[{len(texts)}]"
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return f"({', '.join(self.type(item, exact) for item in value)})"
        return ""

    def _layout(self, value: torch.Tensor) -> str:
        where = "" if value.device == (self.device or torch.device("cpu")) else f"@{value.device}"
        if value.layout is not torch.strided:
            return where
        shape, strides = tuple(map(expression, value.shape)), tuple(map(expression, value.stride()))
        key = (*shape, *strides)
        if key not in self._strides:
            normal = is_contiguous(shape, strides)
            self._strides[key] = "" if normal else f"{{{', '.join(self.size(s) for s in value.stride())}}}"
        return self._strides[key] + where


def contiguous_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Strides of a contiguous tensor of `shape`."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether `strides` are the contiguous ones where they count: not along a dimension of one entry, or of none."""
    if 0 in shape:
        return True
    wanted = contiguous_strides(shape)
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True))


def bytes_of(value: Any) -> Size | None:
    """Bytes that the tensors in `value` hold, a formula where a size is symbolic; None where nothing is known."""
    if isinstance(value, torch.Tensor):
        total: Size = value.dtype.itemsize
        for dim in value.shape:
            total = total * expression(dim)
        return total
    if isinstance(value, (list, tuple)):
        sizes = [size for item in value if (size := bytes_of(item)) is not None]
        return cast(Size, sum(sizes)) if sizes else None
    return None


def bytes_text(size: int) -> str:
    """``640 B``, ``12.5 KiB``, ``3.0 MiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"
