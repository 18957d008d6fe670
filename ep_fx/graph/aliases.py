"""Which nodes share memory: from operator schemas, plus the operators whose schema does not say.

    %w = getitem(%gathered, 0)     shares with %gathered
    %t = aten.t(%w)                shares with %w      (schema: Tensor(a) -> Tensor(a))
    %v = aten._unsafe_view(%t)     shares with %t      (exception table)
"""
from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

UNDECLARED: frozenset[str] = frozenset(
    {
        "_c10d_functional::wait_tensor",
        "aten::_unsafe_view",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "aten::unsafe_chunk",
        "aten::type_as",
        "aten::dropout",
        "aten::native_dropout",
        "aten::_to_copy",
        "aten::contiguous",
        "aten::_reshape_alias",
        "aten::lift_fresh",
        "aten::lift",
    }
)
"""Operators that may return their first argument's memory though their schema declares no alias."""


def _nodes_in(value: Any) -> Iterable[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)


def alias_sources(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of `node` may share, in argument order, each once."""
    if node.op == "output":
        return []
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return _getitem_sources(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    if schema.name in UNDECLARED:
        return list(_nodes_in(node.args[0]))
    returned = {s for r in schema.returns if r.alias_info for s in r.alias_info.before_set}
    sources: dict[fx.Node, None] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not returned & argument.alias_info.before_set:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        sources.update(dict.fromkeys(_nodes_in(value)))
    return list(sources)


def _getitem_sources(node: fx.Node) -> list[fx.Node]:
    """Element i of a list op that aliases element by element shares with element i of its argument only."""
    container, index = node.args
    assert isinstance(container, fx.Node)
    schema = getattr(container.target, "_schema", None)
    if schema is not None and isinstance(index, int) and container.args and isinstance(container.args[0], (list, tuple)):
        elements = container.args[0]
        if schema.returns and schema.returns[0].alias_info and index < len(elements):
            element = elements[index]
            return [element] if isinstance(element, fx.Node) else []
    return [container]


def aliases_of(node: fx.Node) -> list[fx.Node]:
    """`node` and every node that may share its memory downstream, in order of discovery."""
    found: dict[fx.Node, None] = {node: None}
    queue = deque([node])
    while queue:
        current = queue.popleft()
        for user in current.users:
            if user not in found and _shares(user, current):
                found[user] = None
                queue.append(user)
    return list(found)


def _shares(user: fx.Node, source: fx.Node) -> bool:
    return any(s is source for s in alias_sources(user))


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
