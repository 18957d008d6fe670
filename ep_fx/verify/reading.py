"""Reading arguments of nodes, however a pass wrote them down."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx


def arg(node: fx.Node, position: int) -> Any:
    """An argument by position, wherever it was given; the schema's default where it was not."""
    if position < len(node.args):
        return node.args[position]
    if not isinstance(node.target, torch._ops.OpOverload) or position >= len(node.target._schema.arguments):
        return None
    argument = node.target._schema.arguments[position]
    return node.kwargs.get(argument.name, argument.default_value)


def flat_nodes(value: Any) -> Iterator[fx.Node]:
    """The nodes in a nested argument."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat_nodes(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_nodes(item)


def names(nodes: Iterable[fx.Node]) -> str:
    """``%a, %b`` for messages."""
    return ", ".join(f"%{node.name}" for node in nodes) or "nothing"
