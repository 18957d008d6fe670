"""Where a graph has what a pattern shows.

The search begins at one node and goes along the edges of the pattern: to arguments, which are determined, and to users,
of which one after the other is tried. Every edge, shape, dtype and number must agree; `add` and `mul` may have their
operands the other way round. One node of the graph is the place of one node of the pattern, and nothing outside a match
may read what is not an output of it. The cost is that of the pattern for each node to begin at.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ep_fx.graph import Role, role_of
from ep_fx.targets.npu.patterns.pattern import Pattern
from ep_fx.targets.npu.patterns.sizes import Sizes, is_size, same_shape, same_size

aten = torch.ops.aten
_COMMUTES = (aten.add.Tensor, aten.mul.Tensor)
_TRIES = 32


@dataclass
class Match:
    """A pattern's place in a graph.

    Args:
        nodes: the graph's node for each of the pattern's.
        inputs: the values that stand for each input, more than one where a parameter is gathered twice.
        numbers: the values of its numbers.
        sizes: the values of its symbols.
    """

    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[str, list[fx.Node]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)
    expected: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def copy(self) -> Match:
        """One that can be continued in another way."""
        inputs = {name: list(values) for name, values in self.inputs.items()}
        return Match(dict(self.nodes), inputs, dict(self.numbers), dict(self.sizes), dict(self.expected))


def find(pattern: Pattern, start: fx.Node) -> Match | str | None:
    """The match in which `start` is the place of the pattern's first node of the same target.

    Returns:
        the match; a reason, where one is there but is read from outside; None where there is none.
    """
    anchor = next((n for n in pattern.nodes if n.target is start.target), None)
    if anchor is None:
        return None
    reason: str | None = None
    steps = _steps(pattern.nodes, anchor)
    for tried, match in enumerate(_search(pattern, steps, start, 0, Match())):
        leak = _leak(pattern, match)
        if leak is None:
            return match
        reason = reason or leak
        if tried == _TRIES:
            break
    return reason


@lru_cache(maxsize=1024)
def _steps(nodes: tuple[fx.Node, ...], anchor: fx.Node) -> tuple[tuple[fx.Node, fx.Node | None], ...]:
    """The order in which nodes are placed; each with the argument by whose users it is found, None where it is itself
    an argument of one before it."""
    inside, done, seen = set(nodes), {anchor}, set[fx.Node](anchor.all_input_nodes)
    steps: list[tuple[fx.Node, fx.Node | None]] = [(anchor, None)]
    while len(steps) < len(nodes):
        rest = [n for n in nodes if n not in done]
        found: tuple[fx.Node, fx.Node | None] | None = next(((n, None) for n in rest if n in seen), None)
        found = found or next(((n, a) for n in rest for a in n.all_input_nodes if a in done), None)
        found = found or next(((n, a) for n in rest for a in n.all_input_nodes if a in seen and a not in inside), None)
        if found is None:
            raise ValueError(f"the pattern falls apart: {rest[0]} has no edge to what is placed before it")
        steps.append(found)
        done.add(found[0])
        seen.update(found[0].all_input_nodes)
    return tuple(steps)


def _search(
    pattern: Pattern, steps: Sequence[tuple[fx.Node, fx.Node | None]], start: fx.Node, index: int, match: Match
) -> Iterator[Match]:
    if index == len(steps):
        yield match
        return
    node, by = steps[index]
    for candidate in [start] if index == 0 else _candidates(pattern, node, by, match):
        if candidate.target is not node.target:
            continue
        for swapped in (False, True) if node.target in _COMMUTES else (False,):
            longer = match.copy()
            if _put(pattern, node, candidate, swapped, longer):
                yield from _search(pattern, steps, start, index + 1, longer)


def _candidates(pattern: Pattern, node: fx.Node, by: fx.Node | None, match: Match) -> list[fx.Node]:
    if by is None or node in match.expected:
        return [match.expected[node]]
    sources = [match.nodes[by]] if by in match.nodes else match.inputs[pattern.inputs[by]]
    taken = set(match.nodes.values())
    return [user for source in sources for user in source.users if user not in taken]


def _put(pattern: Pattern, node: fx.Node, place: fx.Node, swapped: bool, match: Match) -> bool:
    """Enters `place` for `node`; False where they do not agree."""
    match.nodes[node] = place
    args = [*reversed(place.args[:2]), *place.args[2:]] if swapped else list(place.args)
    if not same_shape(node.meta["val"], place.meta.get("val"), match.sizes) or len(args) != len(node.args):
        return False
    if node.target is not aten._to_copy.default and node.kwargs.keys() != place.kwargs.keys():
        return False
    pairs = zip(node.args, args, strict=True)
    kwargs = {"dtype"} if node.target is aten._to_copy.default else set(node.kwargs)
    return all(_agree(pattern, a, b, match) for a, b in pairs) and all(
        _agree(pattern, node.kwargs.get(k), place.kwargs.get(k), match) for k in kwargs
    )


def _agree(pattern: Pattern, wanted: Any, got: Any, match: Match) -> bool:
    """Whether an argument is what the pattern has in its place."""
    if isinstance(wanted, (list, tuple)):
        same = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        return same and all(_agree(pattern, a, b, match) for a, b in zip(wanted, got, strict=True))
    if isinstance(wanted, fx.Node) and wanted in pattern.inputs:
        return isinstance(got, fx.Node) and _is_input(pattern.inputs[wanted], got, match)
    if is_size(wanted):
        return is_size(got) and same_size(wanted, got, match.sizes)
    if isinstance(wanted, fx.Node):
        known = match.nodes.get(wanted) or match.expected.setdefault(wanted, got)
        return isinstance(got, fx.Node) and known is got
    if isinstance(wanted, float) and wanted in pattern.numbers:
        is_number = isinstance(got, (int, float)) and not isinstance(got, bool)
        return is_number and match.numbers.setdefault(pattern.numbers[wanted], got) == got
    return type(wanted) is type(got) and bool(wanted == got)


def _is_input(name: str, got: fx.Node, match: Match) -> bool:
    known = match.inputs.setdefault(name, [got])
    if got not in known:
        if origin(known[0]) != origin(got):
            return False
        known.append(got)
    return True


def origin(node: fx.Node) -> Any:
    """Equal for two nodes that hold one value: themselves, or what two gathers make of the same parameter."""
    role = role_of(node)
    if role in (Role.PAD_SHARD, Role.ASSEMBLE):
        return node.target, origin(node.args[0]), node.args[1:]  # type: ignore[arg-type]
    if role is not Role.GETITEM:
        return node
    gather, index = node.args
    while role_of(gather) is Role.UNSHARD_WAIT:  # type: ignore[arg-type]
        gather = gather.args[0]  # type: ignore[union-attr]
    return origin(gather.args[0][index]) if role_of(gather) is Role.UNSHARD else node  # type: ignore[union-attr,index,arg-type]


def _leak(pattern: Pattern, match: Match) -> str | None:
    """What outside the match reads something of it that is no output."""
    places, outputs = set(match.nodes.values()), {term for terms in pattern.outputs.values() for term in terms}
    for node, place in match.nodes.items():
        if node not in outputs and (reader := next((u for u in place.users if u not in places), None)) is not None:
            return f"%{place.name} in the middle of it is read by %{reader.name}, which is no part of it"
    return None
