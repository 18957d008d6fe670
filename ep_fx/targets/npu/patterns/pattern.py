"""A pattern: the graph of an example, whose inputs stand for any value and whose named numbers for any number.

An output may be a sum of terms. A gradient is, where the input was used more than once: autograd adds to it whatever
else there is of that tensor's gradient, in an order of its own, so that a graph need not have the sum of these terms
alone anywhere. Terms are matched one by one.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Pattern:
    """What is looked for.

    Args:
        nodes: operators whose results are tensors, in order.
        inputs: names of the placeholders.
        outputs: the terms of each output, by name.
        numbers: names of the arguments that may be any number, by the value that the example was given.
    """

    nodes: tuple[fx.Node, ...]
    inputs: Mapping[fx.Node, str]
    outputs: Mapping[str, tuple[fx.Node, ...]]
    numbers: Mapping[float, str]

    def only(self, *names: str) -> Pattern:
        """The same with these outputs alone, and with what they are computed from."""
        outputs = {name: self.outputs[name] for name in names}
        needed = _ancestors(term for terms in outputs.values() for term in terms)
        return Pattern(tuple(n for n in self.nodes if n in needed), self.inputs, outputs, self.numbers)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def terms_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """What `node` is the sum of; itself where it is no sum."""
    if not is_sum(node):
        return (node,)
    left, right = node.args
    return (*terms_of(left), *terms_of(right))  # type: ignore[arg-type]


def is_sum(node: fx.Node) -> bool:
    """Whether `node` adds two tensors, neither scaled nor broadcast."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    whole = _type_of(node)
    return whole is not None and all(_type_of(a) == whole for a in node.args)


def _type_of(node: Any) -> tuple[tuple[Any, ...], torch.dtype] | None:
    value = node.meta.get("val")
    return (tuple(map(str, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else None
