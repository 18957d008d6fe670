"""Operators that write their argument become those that do not, where nobody can tell the difference.

    %div = aten.div_.Tensor(%values, %sum)      ->      %div = aten.div.Tensor(%values, %sum)

Later readers of the argument read the result. A write stays where memory that outlives the graph is written (buffers,
inputs), or where another view of that memory is read later; so do `reshard`, and operators whose other form has no
kernel.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from ep_fx.graph import ParallelGraph, Role, is_mutation, role_of
from ep_fx.graph.aliases import Aliases, Memory
from ep_fx.graph.effects import written_by
from ep_fx.targets.npu.aten import has_kernel
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.edit import value_of

_NAME = "in_place"


class _Memory:
    """Who holds which memory, and the place of each node, before anything is rewritten."""

    def __init__(self, graph: ParallelGraph) -> None:
        self.aliases = Aliases(graph)
        self.position = dict(self.aliases.table.position)
        self.holders: dict[Memory, list[fx.Node]] = {}
        for node in graph:
            for memory in self.aliases.memory(node):
                self.holders.setdefault(memory, []).append(node)


def _apply(graph: ParallelGraph) -> None:
    writers = [node for node in graph if is_mutation(node) and role_of(node) is not Role.RESHARD]
    memory = _Memory(graph) if writers else None
    for node in writers:
        assert memory is not None
        if _outlives(memory, node):
            continue
        other = _other_form(node.target)
        reason = "torch has no other form of it with a kernel" if other is None else _seen(memory, node)
        if reason is not None:
            keep(node, _NAME, reason)
        elif other is not None:
            _replace(graph, node, other, memory.position)


def _other_form(target: Any) -> torch._ops.OpOverload | None:
    """``aten.div.Tensor`` for ``aten.div_.Tensor``, if the device has it."""
    namespace, _, name = target._schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    other = getattr(packet, target._overloadname, None)
    if not isinstance(other, torch._ops.OpOverload) or not has_kernel(other) or other._schema.is_mutable:
        return None
    same = [a.name for a in other._schema.arguments] == [a.name for a in target._schema.arguments]
    return other if same and len(other._schema.returns) == 1 else None


def _outlives(memory: _Memory, node: fx.Node) -> bool:
    """Whether `node` writes a buffer, an input or a constant: that is meant to be seen."""
    written = [place for value in written_by(node) for place in memory.aliases.memory(value)]
    return any(source.op in ("placeholder", "get_attr") for source, _ in written)


def _seen(memory: _Memory, node: fx.Node) -> str | None:
    """How the write would be seen elsewhere than in the result and in the argument itself."""
    written = list(written_by(node))
    if len(written) != 1 or written[0] is not node.args[0]:
        return "it writes something else than its first argument"
    places = memory.aliases.memory(written[0])
    holders = {holder for place in places for holder in memory.holders.get(place, ())} - {written[0]}
    for holder in holders - _views_of(node, holders):
        late = next((user for user in holder.users if memory.position[user] > memory.position[node]), None)
        if late is not None:
            return f"%{late.name} reads the same memory later, as %{holder.name}"
    return None


def _views_of(node: fx.Node, holders: set[fx.Node]) -> set[fx.Node]:
    """`node` and those of `holders` that are made of it."""
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user in holders and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _replace(
    graph: ParallelGraph, node: fx.Node, other: torch._ops.OpOverload, position: dict[fx.Node, int]
) -> None:
    old, written = value_of(node), node.args[0]
    assert isinstance(written, fx.Node)
    arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode(old)
    assert mode is not None
    assert mode.shape_env is not None
    with mode, mode.shape_env.suppress_guards():
        value = other(*arguments, **named)
    later = [user for user in written.users if position[user] > position[node]]
    with graph.graph.inserting_before(node):
        result = graph.call(other, *node.args, like=node, value=value)
        result.kwargs = node.kwargs
        position[result] = position[node]
        if value.dtype is not old.dtype:  # a write keeps the dtype of what it writes
            result = graph.call(torch.ops.aten._to_copy.default, result, like=node, value=value.to(old.dtype))
            result.kwargs = {"dtype": old.dtype}
            position[result] = position[node]
    for user in later:
        user.replace_input_with(written, result)
    node.replace_all_uses_with(result)
    graph.graph.erase_node(node)


IN_PLACE = Lowering(
    name=_NAME,
    takes="operators of ATen that write their first argument",
    emits=(),
    fallback="the operator as it is",
    source="torch: the operator without the underscore",
    apply=_apply,
)
