"""Which nodes share memory: from operator schemas, plus the operators whose schema does not say.

    %w = getitem(%gathered, 0)     shares with element 0 of %gathered
    %t = aten.t(%w)                shares with %w      (schema: Tensor(a) -> Tensor(a))
    %v = aten._unsafe_view(%t)     shares with %t      (exception table)

"May share" is what counts: `aten.reshape` is an alias though it copies where it must. One walk, O(nodes).
"""
from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from ep_fx.graph.table import NodeTable, table_of

UNDECLARED: frozenset[str] = frozenset(
    {
        "_c10d_functional::wait_tensor",
        "aten::_unsafe_view",
        "aten::alpha_dropout",
        "aten::dropout",
        "aten::feature_alpha_dropout",
        "aten::feature_dropout",
        "aten::lift",
        "aten::type_as",
        "aten::unsafe_chunk",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "prims::device_put",
    }
)
"""Operators that may return their first argument's memory though their schema declares no alias."""

Memory = tuple[fx.Node, int | None]
"""A place where memory begins: a node, or one element of the list that a node returns."""


class _Plan(NamedTuple):
    """How the results of one operator share memory with its arguments.

    Args:
        returns: for each result the (position, name) of every argument it may share with.
        element_wise: the one result and its one source are lists that share element by element.
        is_list: the one result is a list.
    """

    returns: tuple[tuple[tuple[int, str], ...], ...]
    element_wise: bool
    is_list: bool


def _plan(target: Any) -> _Plan | None:
    """The plan of an operator, None where it returns nothing but memory of its own."""
    known = _PLANS.get(id(target))
    if known is not None:
        return known[0]
    if not isinstance(target, torch._ops.OpOverload):
        return None
    plan = _plan_of(target)
    _PLANS[id(target)] = plan, target
    return plan


_PLANS: dict[int, tuple[_Plan | None, Any]] = {}
"""Plans by identity, since the hash of an operator is a call; the operator is kept, so that none takes its place."""


def _plan_of(target: torch._ops.OpOverload) -> _Plan | None:
    schema = target._schema
    results = schema.returns
    is_list = len(results) == 1 and str(results[0].type).startswith("List")
    if schema.name in UNDECLARED:
        return _Plan((((0, schema.arguments[0].name),),) * len(results), False, is_list)
    returns, element_wise = [], False
    for result in results:
        sources = [(i, a) for i, a in enumerate(schema.arguments) if _share(result.alias_info, a.alias_info)]
        element_wise = is_list and len(sources) == 1 and str(sources[0][1].type).startswith("List")
        returns.append(tuple((position, argument.name) for position, argument in sources))
    return _Plan(tuple(returns), element_wise, is_list) if any(returns) else None


def _share(result: Any, argument: Any) -> bool:
    """Whether two alias annotations may mean the same memory; torch drops the labels of those inside a list."""
    if result is None or argument is None:
        return False
    labels, others = result.before_set, argument.before_set
    return not labels or not others or not labels.isdisjoint(others)


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)


class Aliases:
    """The memory behind each node of a graph.

    Args:
        nodes: all nodes, in order; the graph must not change while this object is in use.
    """

    def __init__(self, nodes: Iterable[fx.Node] | NodeTable) -> None:
        self.table = table_of(nodes)
        self._shared: dict[fx.Node, tuple[Memory, ...]] = {}
        self._elements: dict[fx.Node, tuple[tuple[Memory, ...], ...]] = {}
        self._mirrors: dict[fx.Node, fx.Node] = {}
        for index, kind in enumerate(self.table.kinds):
            if kind.target is not None:
                known = _PLANS.get(id(kind.target))
                if known is None or known[0] is not None:
                    self._add(self.table.nodes[index])

    def memory(self, node: fx.Node) -> tuple[Memory, ...]:
        """Where the memory that `node` may hold begins; ``(node, None)`` for memory of its own."""
        node = self._mirrors.get(node, node)
        if node in self._elements:
            return tuple(dict.fromkeys(m for element in self._elements[node] for m in element))
        return self._shared.get(node, ((node, None),))

    def is_shared(self, node: fx.Node) -> bool:
        """Whether `node` may hold memory that is not all its own."""
        return node in self._shared or node in self._mirrors or node in self._elements

    @property
    def shared(self) -> Iterable[fx.Node]:
        """The nodes that may hold memory which begins elsewhere, in order."""
        return self._shared.keys()

    def _add(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._shared[node] = self._element(node)
            return
        plan = _plan(node.target)
        if plan is None:
            return
        sources = [_argument(node, *plan.returns[0][0])] if plan.element_wise else []
        if sources and isinstance(sources[0], fx.Node):
            self._mirrors[node] = self._mirrors.get(sources[0], sources[0])
        elif sources:
            self._elements[node] = tuple(self._memory_of([item]) for item in sources[0])
        elif len(plan.returns) == 1:
            self._shared[node] = self._memory_of([_argument(node, *s) for s in plan.returns[0]])
        else:
            self._elements[node] = tuple(
                self._memory_of([_argument(node, *s) for s in of_one]) or ((node, index),)
                for index, of_one in enumerate(plan.returns)
            )

    def _memory_of(self, values: Any) -> tuple[Memory, ...]:
        nodes = list(_nodes_in(values))
        if len(nodes) == 1:
            return self.memory(nodes[0])
        return tuple(dict.fromkeys(m for node in nodes for m in self.memory(node)))

    def _element(self, node: fx.Node) -> tuple[Memory, ...]:
        container, index = node.args
        if not isinstance(container, fx.Node):
            return ((node, None),)
        container = self._mirrors.get(container, container)
        elements = self._elements.get(container)
        if elements is not None and isinstance(index, int) and -len(elements) <= index < len(elements):
            return elements[index]
        if container in self._shared:
            return self._shared[container]
        return ((container, index if isinstance(index, int) else None),)


def alias_sources(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of `node` may share, in argument order, each once."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return _getitem_sources(node)
    plan = _plan(node.target)
    if plan is None:
        return []
    places = dict.fromkeys(place for of_one in plan.returns for place in of_one)
    return list(dict.fromkeys(n for place in places for n in _nodes_in(_argument(node, *place))))


def _getitem_sources(node: fx.Node) -> list[fx.Node]:
    """Element i of a list that shares element by element shares with element i of the argument only."""
    container, index = node.args
    if not isinstance(container, fx.Node):
        return []
    plan = _plan(container.target) if container.op == "call_function" else None
    if plan is not None and plan.element_wise and isinstance(index, int):
        elements = _argument(container, *plan.returns[0][0])
        if isinstance(elements, (list, tuple)) and index < len(elements):
            return list(_nodes_in(elements[index]))
    return [container]


def aliases_of(node: fx.Node) -> list[fx.Node]:
    """`node` and every node that may share its memory downstream, in order of discovery."""
    found: dict[fx.Node, None] = {node: None}
    queue = deque([node])
    while queue:
        current = queue.popleft()
        for user in current.users:
            if user not in found and any(source is current for source in alias_sources(user)):
                found[user] = None
                queue.append(user)
    return list(found)


def alias_root(node: fx.Node) -> list[fx.Node]:
    """The nodes at which the memory that `node` may share begins."""
    roots: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        sources = alias_sources(current)
        if not sources:
            roots[current] = None
        stack.extend(sources)
    return list(roots)
