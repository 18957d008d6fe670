"""Sizes of a pattern against sizes of a graph: by value, never by the node that computes them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

Sizes = dict[sympy.Symbol, sympy.Expr]
"""What each symbol of a pattern stands for in the graph."""


def is_size(value: Any) -> bool:
    """Whether `value` is a whole number, a symbol, or a node with such a value."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def same_size(wanted: Any, got: Any, sizes: Sizes) -> bool:
    """Whether `got` is what `wanted` says; a symbol that is met for the first time is entered in `sizes`."""
    left, right = _expression(wanted), _expression(got)
    if isinstance(left, sympy.Symbol):
        return bool(sizes.setdefault(left, right) == right)
    value = left.xreplace(sizes)
    return bool(value == right or sympy.expand(value - right) == 0)


def same_shape(wanted: torch.Tensor, got: Any, sizes: Sizes) -> bool:
    """Whether `got` is a tensor of the dtype and of the sizes that `wanted` has."""
    if not isinstance(got, torch.Tensor) or got.dtype is not wanted.dtype or got.dim() != wanted.dim():
        return False
    return all(same_size(a, b, sizes) for a, b in zip(_known_first(wanted), _reordered(got, wanted), strict=True))


def _known_first(tensor: torch.Tensor) -> Sequence[Any]:
    return [tensor.shape[d] for d in _order(tensor)]


def _reordered(got: torch.Tensor, wanted: torch.Tensor) -> Sequence[Any]:
    return [got.shape[d] for d in _order(wanted)]


def _order(tensor: torch.Tensor) -> list[int]:
    """Dimensions that are one symbol before those that are computed from symbols."""
    return sorted(range(tensor.dim()), key=lambda d: not isinstance(_expression(tensor.shape[d]), sympy.Symbol))


def _expression(value: Any) -> sympy.Expr:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
