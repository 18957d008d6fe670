"""Fake values from the text of their types: ``f32[s0, 64]``, ``[i64[u0], bool[]]``, ``2*s0``.

One mode and one set of symbols for a graph: ``s0, s1, ..`` are sizes with a hint of their own, ``u0, u1, ..`` are
unbacked. Equal texts share one value. Private torch API used here: ``FakeTensorMode``, ``ShapeEnv``
and its ``_generate_unique_id``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions

from ep_fx.graph.literals import Reader
from ep_fx.graph.values import contiguous_strides

_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\[\]{}]*)\](?:\{(?P<strides>[^{}]*)\})?(?:@(?P<device>[\w:]+))?")
_LIST = re.compile(r"list\[\d+\]")
_FIRST_HINT = 5
_HIGHEST_POWER = 64
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: _power(a, b),
    ast.FloorDiv: functions.FloorDiv,
    ast.Mod: functions.Mod,
}


class _Env(ShapeEnv):
    """Symbols of sizes have the numbers that the text gives them, so that they sort as they did there."""

    def _generate_unique_id(self, source_name: str) -> int:
        number = int(source_name[1:])
        self.unique_ids.add(number)
        return number


class Fakes:
    """Makes fake values of one graph.

    Args:
        device: device of values that name none.
        hints: sizes of symbols; one that is not among them gets a prime of its own.
    """

    def __init__(self, device: str, hints: Mapping[str, int] | None = None) -> None:
        self._given = dict(hints or {})
        self.env = _Env()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self._device = torch.device(device)
        self._symbols: dict[str, sympy.Expr] = {}
        self._hints: dict[sympy.Expr, int] = {}
        self._known: dict[str, Any] = {}

    def value(self, text: str) -> Any:
        """The value of which `SymbolNames.type` says `text`; None for ``list[n]``, which says too little.

        Raises:
            ValueError: the text has another form.
        """
        if text not in self._known:
            self._known[text] = self._make(text)
        return self._known[text]

    def _make(self, text: str) -> Any:
        if _LIST.fullmatch(text):
            return None
        if text.startswith("["):
            return [self.value(part) for part in _parts(text[1:-1])]
        if text.startswith("("):
            return tuple(self.value(part) for part in _parts(text[1:-1]))
        match = _TENSOR.fullmatch(text)
        if match is not None:
            return self._tensor(match)
        if text in ("True", "False"):
            return text == "True"
        if text in ("float", "bool"):
            made = self.env.create_unbacked_symfloat() if text == "float" else self.env.create_unbacked_symbool()
            return made
        if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+|-?inf|nan", text):
            return float(text)
        return self._size(text)

    def _tensor(self, match: re.Match[str]) -> torch.Tensor:
        shape = [self._expression(part) for part in _parts(match["shape"])]
        strides = contiguous_strides(shape)
        if match["strides"] is not None:
            strides = tuple(self._expression(part) for part in _parts(match["strides"]))
        dtype = Reader(match["dtype"], {}).value()
        device = torch.device(match["device"]) if match["device"] else self._device
        sizes, steps = ([self._sized(expression) for expression in values] for values in (shape, strides))
        with self.mode:
            return torch.empty_strided(sizes, steps, dtype=dtype, device=device)

    # -- sizes -----------------------------------------------------------------------------------------------------
    def _size(self, text: str) -> Any:
        return self._sized(self._expression(text))

    def _sized(self, expression: Any) -> Any:
        """An int, or a SymInt with the hint that follows from the hints of its symbols."""
        if isinstance(expression, int) or expression.is_number:
            return int(expression)
        known = all(symbol in self._hints for symbol in expression.free_symbols)
        hint = int(expression.xreplace({s: sympy.Integer(h) for s, h in self._hints.items()})) if known else None
        return self.env.create_symintnode(expression, hint=hint)

    def _expression(self, text: str) -> Any:
        for name in sorted(set(re.findall(r"\b[su]\d+\b", text)), key=lambda name: (name[0], int(name[1:]))):
            self._symbol(name)  # in this order, for the numbers of unbacked ones
        try:
            return self._evaluate(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, TypeError) as error:
            raise ValueError(f"{text!r} is no size and no type") from error

    def _evaluate(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name):
            return self._symbol(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._evaluate(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](self._evaluate(node.left), self._evaluate(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            function = getattr(functions, node.func.id, None)
            if isinstance(function, type) and issubclass(function, sympy.Basic):
                return function(*map(self._evaluate, node.args))
        raise ValueError(f"{ast.unparse(node)!r} is no size and no type")

    def _symbol(self, name: str) -> sympy.Expr:
        if not re.fullmatch(r"[su]\d+", name):
            raise ValueError(f"{name!r} is no size: sizes are s0, s1, .. and u0, u1, ..")
        if name not in self._symbols:
            self._symbols[name] = self._backed(name) if name[0] == "s" else self._unbacked()
        return self._symbols[name]

    def _backed(self, name: str) -> sympy.Expr:
        taken = [_FIRST_HINT - 1, *self._given.values(), *self._hints.values()]
        hint = self._given.get(name) or sympy.nextprime(max(taken))
        symbol = self.env.create_symbol(int(hint), ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
        self._hints[symbol] = int(hint)
        return symbol

    def _unbacked(self) -> sympy.Expr:
        size = self.env.create_unbacked_symint()
        torch._check(size >= 0)
        return size.node.expr


def _power(base: Any, exponent: Any) -> Any:
    """No size is a higher power than these, which a damaged text would have worked out."""
    if not isinstance(exponent, int) or abs(exponent) > _HIGHEST_POWER:
        raise ValueError(f"{exponent!r} is no exponent of a size")
    return base**exponent


def _parts(text: str) -> list[str]:
    """`text` cut at its outermost commas."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += sign in "([{"
        depth -= sign in ")]}"
        if sign == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
