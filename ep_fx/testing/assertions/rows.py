"""Ways of rows between halves of exchanges, told apart from the context that the halves share.

Rows go from the exchange of one half through its end (`regroup`, `pad_rows`) into the start (`send_rows`, `ungroup`),
the exchange and the end of the other. Edges of split sizes, indices, counts and sizes are no way for them. A half's
context is the `dispatch_context` (or the dispatch of one rank) whose values it reads.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ep_fx.graph import Role, role_of
from ep_fx.graph.places import Action
from ep_fx.testing.graph_index import GraphIndex
from ep_fx.testing.select import Match

_STARTS = frozenset({Role.SEND_ROWS, Role.UNGROUP})
_ENDS = frozenset({Role.REGROUP, Role.PAD_ROWS})
_WHOLE = frozenset({Role.DISPATCH, Role.COMBINE, Role.COMBINE_BACKWARD, Role.DISPATCH_BACKWARD})
"""One half as a single node."""
_PRODUCTS = {Role.GROUPED_MM: False, Role.GROUPED_MM_BACKWARD: True}
_BACKWARD = frozenset({Action.COMBINE_BACKWARD, Action.DISPATCH_BACKWARD})
_ROWS = {
    **dict.fromkeys((*_STARTS, *_ENDS, Role.EXCHANGE, Role.WAIT, Role.COMBINE, Role.COMBINE_BACKWARD), (0,)),
    Role.DISPATCH: (0, 2), Role.DISPATCH_BACKWARD: (0, 1), Role.CONTEXT: (),
}
"""Which arguments of an exchange's nodes are rows, or weights of rows."""
_DISPATCHED = 2
"""Results of a logical dispatch that are rows; the others are its context."""


@dataclass(frozen=True, eq=False)
class Half:
    """Where rows pass through a match.

    Args:
        match: one half of a region's exchange, or a product of experts.
        backward: whether its rows are gradients.
        starts, exchanges, ends: the nodes that rows pass, in this order.
        contexts: whose values it reads.
    """

    match: Match
    backward: bool
    starts: frozenset[fx.Node]
    exchanges: frozenset[fx.Node]
    ends: frozenset[fx.Node]
    contexts: frozenset[fx.Node]


def half_of(index: GraphIndex, match: Match) -> Half | None:
    """The half that `match` is; None where it is no half, and no product of experts."""
    single = {node for node in match.nodes if role_of(node) in _WHOLE or role_of(node) in _PRODUCTS}
    exchanges = {node for node in match.nodes if role_of(node) is Role.EXCHANGE and not _of_counts(node)} | single
    starts = {node for node in match.nodes if role_of(node) in _STARTS} | single
    starts |= {a for node in exchanges for a in node.all_input_nodes if role_of(a) in _STARTS}
    ends = {node for node in match.nodes if role_of(node) in _ENDS} | single
    ends |= {u for node in exchanges for wait in node.users for u in wait.users if role_of(u) in _ENDS}
    run = index.of[match.nodes[0]].run
    if run is None and role_of(match.nodes[0]) not in _PRODUCTS:
        return None
    backward = run[1] in _BACKWARD if run is not None else _PRODUCTS[role_of(match.nodes[0])]
    nodes = starts | exchanges | ends
    contexts = {context for node in nodes for context in _contexts(node)}
    return Half(match, backward, *map(frozenset, (starts, exchanges, ends, contexts)))


def carries(source: Half, target: Half, start: fx.Node, within: bool) -> frozenset[fx.Node]:
    """The ends of `target` that rows of `source` come to from its exchange `start`.

    Args:
        within: the way may not lead through the exchange of another half.
    """
    left = _reach({start}) & source.ends | ({start} & source.ends)
    entered = target.starts & _reach(left, within)
    exchanged = target.exchanges & (_reach(entered) | entered)
    return target.ends & (_reach(exchanged) | exchanged)


def _reach(start: Iterable[fx.Node], within: bool = False) -> set[fx.Node]:
    """All nodes that rows of `start` come to; where `within`, up to the next exchanges."""
    stack, reached = list(start), set[fx.Node]()
    while stack:
        node = stack.pop()
        for user in node.users:
            if user not in reached and _takes_rows(user, node):
                reached.add(user)
                if not (within and (role_of(user) is Role.EXCHANGE or role_of(user) in _WHOLE)):
                    stack.append(user)
    return reached


def _takes_rows(node: fx.Node, source: fx.Node) -> bool:
    """Whether the edge from `source` to `node` hands on rows, not sizes, indices or counts."""
    role = role_of(node)
    if role in _ROWS:
        return any(node.args[i] is source for i in _ROWS[role] if i < len(node.args))
    if node.op == "output" or (role is Role.GETITEM and _is_context(source, node.args[1])):
        return False
    value = source.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return value is None or isinstance(value, (tuple, list))


def _is_context(owner: Any, item: Any) -> bool:
    role = role_of(owner)
    return role is Role.CONTEXT or (role is Role.DISPATCH and item >= _DISPATCHED)


def _contexts(node: fx.Node) -> list[fx.Node]:
    """Whose context values an exchange's node reads."""
    if role_of(node) is Role.DISPATCH:
        return [node]
    items = [a for a in node.all_input_nodes if role_of(a) is Role.GETITEM]
    return [a.all_input_nodes[0] for a in items if _is_context(a.args[0], a.args[1])]


def _of_counts(exchange: fx.Node) -> bool:
    return any(role_of(user) is Role.CONTEXT for wait in exchange.users for user in wait.users)
