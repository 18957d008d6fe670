"""What a match computes is computed anew, and the nodes of the match are gone.

Of an output with more than one term the first becomes the whole, the others leave the sums that they are in. These sums
must meet: then all terms count once in one total, whatever else is in it.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.targets.npu.patterns.match import Match
from ep_fx.targets.npu.patterns.pattern import Pattern, is_sum


def place(pattern: Pattern, match: Match, outputs: Sequence[str], inputs: Sequence[fx.Node]) -> fx.Node | str:
    """The node of the match before which `outputs` can be computed from `inputs`, or why there is none."""
    wanted = pattern.only(*outputs)
    latest = max(inputs)
    point = min((n for node in wanted.nodes if (n := match.nodes[node]) > latest), default=None)
    if point is None:
        return f"no node of it comes after %{latest.name}"
    for node in inputs:
        if (freed := next((f for f in _frees(node) if f < point), None)) is not None:
            return f"%{freed.name} frees %{node.name} before"
    for name in outputs:
        terms = [match.nodes[t] for t in wanted.outputs[name]]
        if (early := next((u for t in terms for u in t.users if u < point), None)) is not None:
            return f"%{early.name} reads {name} before %{latest.name} is there"
        if len(terms) > 1 and not _meet(terms):
            return f"the terms of {name} do not end in one sum"
    return point


def replace(graph: ParallelGraph, pattern: Pattern, match: Match, outputs: Mapping[str, fx.Node]) -> None:
    """Puts `outputs`, which were made at `place`, where the match has its own, and erases what nobody reads then."""
    for name, new in outputs.items():
        first, *others = (match.nodes[term] for term in pattern.outputs[name])
        for term in others:
            total = next(iter(term.users))
            total.replace_all_uses_with(next(a for a in total.all_input_nodes if a is not term))
            graph.graph.erase_node(total)
        first.replace_all_uses_with(new)
    for node in sorted(set(match.nodes.values()), reverse=True):
        if not node.users:
            graph.graph.erase_node(node)


def _frees(node: fx.Node) -> Iterator[fx.Node]:
    """What frees the memory of `node`, a gathered parameter or a view of one."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return (user for user in node.users if role_of(user) is Role.RESHARD)


def _meet(terms: Sequence[fx.Node]) -> bool:
    """Whether every term is added once, and these sums end in one that has all of them."""
    paths = [_sums(term) for term in terms]
    return len(set(terms)) == len(terms) and bool(set.intersection(*map(set, paths)))


def _sums(term: fx.Node) -> list[fx.Node]:
    """The sums that `term` goes into, as long as nothing but the next sum reads the one before."""
    found: list[fx.Node] = []
    node = term
    while len(node.users) == 1:
        (user,) = node.users
        if not is_sum(user) or user.args[0] is user.args[1]:
            break
        found.append(user)
        node = user
    return found
