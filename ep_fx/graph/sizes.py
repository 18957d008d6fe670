"""Numbers for the sizes of a graph: symbols of inputs as in the trace, rows of an exchange as on balanced routing.

    s0, s1, ..    the size with which the graph was traced, or the one that is asked for
    u0, u1, ..    rows of a dispatch, with an exchange or without: as many as this rank sends; 1 where a symbol is none
                  of these

For pictures and estimates only; no rule reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import sympy
import torch
from torch import fx

from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import Role, role_of
from ep_fx.graph.values import Size, SymbolNames, bytes_of, expression

_ROWS_SENT = 2
"""Place of the number of rows among the arguments of a dispatch context."""
_INDICES = 3
"""Place of the permuted indices, one for each row that arrives, among the results of a dispatch."""


class TypicalSizes:
    """Typical numbers for the symbolic sizes of one graph.

    Args:
        graph: the graph; it must not change while this object is in use.
        sizes: other sizes than the trace's, by the names of the graph's text: ``{"s0": 8, "s1": 4096}``.

    Raises:
        ValueError: a name that is no size of an input, or a size below 1.
    """

    def __init__(self, graph: ParallelGraph, sizes: Mapping[str, int] | None = None) -> None:
        self._known: dict[sympy.Symbol, int] = _asked_for(graph, sizes) if sizes else {}
        self._cache: dict[Size, int] = {}
        for node in graph:
            value = node.meta.get("val")
            self._learn_hints(value)
            if role_of(node) is Role.GETITEM and role_of(cast(fx.Node, node.args[0])) is Role.CONTEXT:
                context = cast(fx.Node, node.args[0])
                self._learn_rows(context.args[_ROWS_SENT], value)
            if role_of(node) is Role.DISPATCH and isinstance(value, (list, tuple)):
                sent = cast(fx.Node, node.args[0]).meta["val"].shape[0]
                self._learn_rows(sent, list(value[0].shape[:1]))
                self._learn_rows(sent, list(value[_INDICES].shape))

    def _learn_hints(self, value: Any) -> None:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                for symbol, hint in size.node.shape_env.backed_var_to_val.items():
                    self._known.setdefault(symbol, int(hint))
                return

    def _learn_rows(self, rows: Any, value: Any) -> None:
        """As many rows arrive as are sent, and each rank's part of the splits is the same."""
        sent = self.number(rows.meta["val"] if isinstance(rows, fx.Node) else rows)
        sizes = list(value.shape) if isinstance(value, torch.Tensor) and value.dim() == 1 else value
        if not isinstance(sizes, (list, tuple)) or not sizes:
            return
        for index, size in enumerate(sizes):
            symbol = expression(size)
            if isinstance(symbol, sympy.Symbol) and symbol not in self._known:
                self._known[symbol] = sent // len(sizes) + (index < sent % len(sizes))

    def number(self, size: Any) -> int:
        """A number for `size`: an int, a `SymInt` or a sympy expression."""
        value = size if isinstance(size, (int, sympy.Expr)) else expression(size)
        if isinstance(value, int):
            return value
        if value not in self._cache:
            numbers = {symbol: self._known.get(symbol, 1) for symbol in value.free_symbols}
            self._cache[value] = int(value.xreplace(numbers))
        return self._cache[value]

    def bytes(self, value: Any) -> int:
        """Bytes of the tensors in `value`; 0 where nothing is known."""
        size = bytes_of(value)
        return 0 if size is None else self.number(size)

    def shape(self, value: Any) -> tuple[int, ...]:
        """The shape of a tensor; () for anything else."""
        return tuple(self.number(dim) for dim in value.shape) if isinstance(value, torch.Tensor) else ()


def _asked_for(graph: ParallelGraph, sizes: Mapping[str, int]) -> dict[sympy.Symbol, int]:
    names = SymbolNames(graph)
    symbols = names.inputs
    unknown = [name for name in sizes if name not in symbols]
    if unknown:
        free = ", ".join(f"{name} ({size} in the trace)" for name, size in names.hints.items()) or "none: all are fixed"
        raise ValueError(f"no free size {', '.join(map(repr, unknown))}; free sizes of this graph: {free}")
    small = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if small:
        raise ValueError(f"sizes are 1 or more, got {', '.join(small)}")
    return {symbols[name]: int(size) for name, size in sizes.items()}
