"""A graph as plain data that a pipe can carry: fx graphs that call operators cannot be pickled.

    to_wire(graph) -> [(name, op, target, args, kwargs)...]  -> from_wire(...) -> an equal graph without ``meta``

Group names belong to one process: `from_wire` puts the receiver's in place of the sender's.
"""
from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

Wire = list[tuple[str, str, Any, Any, Any]]
_GROUP_ARGUMENTS = ("group", "group_name")


@dataclass(frozen=True)
class _Ref:
    """A node, by name."""

    name: str


def to_wire(graph: fx.Graph) -> Wire:
    """`graph` as plain data."""
    rows: Wire = []
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: cast(Any, _Ref(n.name)))
        target = _name(node.target) if node.op == "call_function" else str(node.target)
        rows.append((node.name, node.op, target, _plain(args), _plain(kwargs)))
    return rows


def from_wire(rows: Wire, groups: Mapping[str, str]) -> fx.Graph:
    """The graph again.

    Args:
        groups: from names of process groups in `rows` to names in this process.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, op, target, args, kwargs in rows:
        args, kwargs = _nodes(args, nodes), _nodes(kwargs, nodes)
        if op == "output":
            nodes[name] = graph.output(args[0])
            continue
        called = _target(*target) if op == "call_function" else target
        nodes[name] = graph.create_node(op, called, _regrouped(called, args, groups), kwargs, name)
    return graph


def _plain(value: Any) -> Any:
    """Without fx's immutable containers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value] if isinstance(value, list) else tuple(_plain(v) for v in value)
    return value


def _nodes(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, _Ref):
        return nodes[value.name]
    if isinstance(value, dict):
        return {key: _nodes(item, nodes) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_nodes(value.start, nodes), _nodes(value.stop, nodes), _nodes(value.step, nodes))
    if isinstance(value, (list, tuple)):
        return type(value)(_nodes(item, nodes) for item in value)
    return value


def _name(target: Any) -> tuple[str, str]:
    if isinstance(target, torch._ops.OpOverload):
        return "", target.name()
    return target.__module__, target.__qualname__


@functools.cache
def _target(module: str, name: str) -> Any:
    if module:
        return getattr(importlib.import_module(module), name)
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _regrouped(target: Any, args: tuple[Any, ...], groups: Mapping[str, str]) -> tuple[Any, ...]:
    if not isinstance(target, torch._ops.OpOverload):
        return args
    named = [argument.name in _GROUP_ARGUMENTS for argument in target._schema.arguments]
    return tuple(
        groups.get(a, a) if is_group and isinstance(a, str) else a
        for a, is_group in zip(args, [*named, *[False] * len(args)], strict=False)
    )
