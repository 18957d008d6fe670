"""Types and sizes of fake values as short, stable text: ``f32[3, s0, 64]``.

Symbols are renumbered by first appearance in the graph (``s0, s1, ..`` for sizes of inputs, ``u0, u1, ..`` for sizes
known only at run time), so the text depends neither on the process nor on how torch numbered them.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch import fx

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}
_SPELLED_OUT = 3
"""A longer list is shown by its length: its elements have lines of their own."""

Size: TypeAlias = int | sympy.Expr


def dtype_text(dtype: torch.dtype) -> str:
    """``f32`` for ``torch.float32``; the name without ``torch.`` where there is no short form."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


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
        for node in nodes:
            self.type(node.meta.get("val"))

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
        value = expression(size)
        if isinstance(value, int):
            return str(value)
        if value not in self._texts:
            self._texts[value] = str(self.rename(value))
        return self._texts[value]

    def type(self, value: Any) -> str:
        """Text of a value's type; empty for a value that is not known."""
        if isinstance(value, torch.Tensor):
            return f"{dtype_text(value.dtype)}[{', '.join(self.size(d) for d in value.shape)}]"
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return str(value.node.pytype.__name__)
        if isinstance(value, (bool, int, float)):
            return type(value).__name__
        if isinstance(value, (list, tuple)):
            texts = [self.type(item) for item in value]
            return f"[{', '.join(texts)}]" if len(texts) <= _SPELLED_OUT else f"list[{len(texts)}]"
        return ""


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
