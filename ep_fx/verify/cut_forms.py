"""Operators that move, choose, join and add up: where the dimension goes that `tp` cuts.

A slice of every rank's part must be the part of a slice: every second feature is, the first half of a part is not,
unless the parameter is packed, gate and up-projection behind each other and each cut.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from ep_fx.graph import target_name
from ep_fx.graph.zeros import is_zero
from ep_fx.verify.cuts import SUMMAND, Cut, NotKnownError, State, shape_of, state_of
from ep_fx.verify.reading import arg, flat_nodes

FORMS = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice",
        "select", "split", "split_with_sizes", "unbind", "cat", "stack", "index_select", "index", "gather", "sum",
        "slice_backward", "select_backward", "index_put", "index_put_", "index_add", "scatter_add", "repeat", "mean",
        "clone", "_to_copy", "detach", "alias",
    )
)
"""Operators that move and add up what they are given: what they make of summands are summands."""
SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
        "new_empty_strided", "rand_like", "randn_like", "sym_size", "sym_numel", "sym_stride",
    )
)


def moved(node: fx.Node, states: dict[fx.Node, Any]) -> State:
    """Where the cut dimension of the first argument is in the result of an operator of `FORMS`.

    Raises:
        NotKnownError: nowhere, or it would hold something else than a part of what one rank alone computes.
    """
    name = target_name(node).removeprefix("aten::")
    if name in ("cat", "stack"):
        return _joined(node, states, name)
    if name in ("index_put", "index_put_"):
        return _put(node, states)
    source = arg(node, 0)
    cut = state_of(states, source)
    if not isinstance(cut, Cut) or any(state_of(states, n) for n in flat_nodes(node.args[1:])):
        raise NotKnownError("whole indices")
    shape = shape_of(source)
    rank = len(shape)
    dim, blocks = cut.dim, cut.blocks
    if name in ("clone", "_to_copy", "detach", "alias"):
        return cut
    if name in ("transpose", "t"):
        pair = (0, 1) if name == "t" else (arg(node, 1) % rank, arg(node, 2) % rank)
        return Cut(pair[1 - pair.index(dim)], blocks) if dim in pair else cut
    if name == "permute":
        return Cut([d % rank for d in arg(node, 1)].index(dim), blocks)
    if name == "unsqueeze":
        return Cut(dim + (arg(node, 1) % (rank + 1) <= dim), blocks)
    if name == "squeeze":
        return _squeezed(node, cut, rank)
    if name == "expand":
        return Cut(dim + len(arg(node, 1)) - rank, blocks)
    if name in ("view", "_unsafe_view", "reshape"):
        return _viewed(shape, shape_of(node), cut)
    if name in ("slice", "split", "split_with_sizes", "slice_backward"):
        return _sliced(node, name, cut, rank)
    if name in ("select", "unbind"):
        along = (arg(node, 1) or 0) % rank
        if along == dim:
            raise NotKnownError("all of the hidden features")
        return Cut(dim - (along < dim), blocks)
    if name == "select_backward":
        return Cut(dim + (arg(node, 2) % (rank + 1) <= dim), blocks)
    if name == "index_select":
        if arg(node, 1) % rank == dim:
            raise NotKnownError("all of the hidden features")
        return cut
    if name == "index":
        return Cut(dim + _index_shift(arg(node, 1), dim), blocks)
    if name == "sum":
        return _reduced(node, cut, rank)
    raise NotKnownError("an operator of which it is known what it does to a part of the hidden features")


def _squeezed(node: fx.Node, cut: Cut, rank: int) -> State:
    dims = arg(node, 1)
    listed = [dims] if isinstance(dims, int) else list(dims) if dims is not None else []
    if dims is None or cut.dim in [d % rank for d in listed]:
        raise NotKnownError("the dimensions to squeeze, none of them the hidden features'")
    return Cut(cut.dim - sum(d % rank < cut.dim for d in listed), cut.blocks)


def _viewed(old: Sequence[Any], new: Sequence[Any], cut: Cut) -> State:
    """The dimension of the new shape that has the same entries, with as many behind it, or before it."""
    for way in (1, -1):
        index = cut.dim if way == 1 else len(old) - 1 - cut.dim
        passed, shape = list(old)[::way][:index], list(new)[::way]
        if not all(isinstance(size, int) for size in passed):
            continue
        due, seen = math.prod(passed), 1
        for place, size in enumerate(shape):
            if seen == due and isinstance(size, int) and size == old[cut.dim]:
                return Cut(place if way == 1 else len(new) - 1 - place, cut.blocks)
            if not isinstance(size, int):
                break
            seen *= size
    raise NotKnownError("a view that leaves the hidden features a dimension of their own")


def _sliced(node: fx.Node, name: str, cut: Cut, rank: int) -> State:
    """Every second feature of each rank is every second of all; half of each rank's is a half only of packed ones."""
    place = {"slice": 1, "split": 2, "split_with_sizes": 2, "slice_backward": 2}[name]
    if (arg(node, place) or 0) % rank != cut.dim:
        return cut
    source = arg(node, 0)
    if name == "slice_backward":
        size, start, end, step = arg(node, 1)[cut.dim], *(arg(node, i) for i in (3, 4, 5))
    elif name == "slice":
        size, start, end, step = shape_of(source)[cut.dim], *(arg(node, i) for i in (2, 3, 4))
    else:
        size, given = shape_of(source)[cut.dim], arg(node, 1)
        sizes = {given} if isinstance(given, int) else set(given)
        start, end, step = 0, sizes.pop(), 1
        if sizes:
            raise NotKnownError("equal parts")
    start, end = start or 0, size if end is None else min(end, size)
    if not all(isinstance(n, int) for n in (size, start, end, step)):
        raise NotKnownError("bounds that are numbers")
    length, inner = end - start, name == "slice_backward"
    if step > 1:
        if size % step or end != size or start >= step:
            raise NotKnownError(f"every {step}th of all hidden features")
        return cut
    if length == size:
        return cut
    blocks = size // length if length > 0 and size % length == 0 and start % length == 0 else 0
    if not blocks or cut.blocks != (1 if inner else blocks):
        raise NotKnownError("a slice of hidden features that is the same on every rank's part as on all of them")
    return Cut(cut.dim, blocks if inner else 1)


def _joined(node: fx.Node, states: dict[fx.Node, Any], name: str) -> State:
    parts = list(arg(node, 0))
    found = {state_of(states, part) for part in parts}
    cut = found.pop()
    if found or not isinstance(cut, Cut):
        raise NotKnownError("values cut alike")
    along, rank = arg(node, 1) or 0, len(shape_of(parts[0]))
    if name == "stack":
        return Cut(cut.dim + (along % (rank + 1) <= cut.dim), cut.blocks)
    if along % rank != cut.dim:
        return cut
    if cut.blocks != 1:
        raise NotKnownError("parts of one block")
    return Cut(cut.dim, len(parts))


def _index_shift(indices: Any, dim: int) -> int:
    """How far index tensors move the dimension `dim` to the right: one tensor, in front of it."""
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][0] >= dim:
        raise NotKnownError("all of the hidden features, chosen by one index in front of them")
    return len(shape_of(given[0][1])) - 1


def _put(node: fx.Node, states: dict[fx.Node, Any]) -> State:
    cut, into = state_of(states, arg(node, 2)), arg(node, 0)
    if not isinstance(cut, Cut) or not (state_of(states, into) is None and is_zero(into)):
        raise NotKnownError("parts of hidden features, put into zeros")
    indices = arg(node, 1)
    for dim in range(len(shape_of(into))):
        if any(i is not None for i in indices[:dim]) and dim + _index_shift(indices, dim) == cut.dim:
            return Cut(dim, cut.blocks)
    raise NotKnownError("all of the hidden features, chosen by one index in front of them")


def _reduced(node: fx.Node, cut: Cut, rank: int) -> State:
    dims = arg(node, 1) if isinstance(arg(node, 1), (list, tuple)) and arg(node, 1) else range(rank)
    summed = {d % rank for d in dims}
    if cut.dim in summed:
        return SUMMAND
    kept = bool(arg(node, 2))
    return cut if kept else Cut(cut.dim - sum(d < cut.dim for d in summed), cut.blocks)
