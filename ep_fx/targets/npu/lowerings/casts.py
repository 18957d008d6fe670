"""Casts of one value to one dtype become one cast, within each direction.

    a = _to_copy(x, bf16)   b = _to_copy(x, bf16)      ->      a alone

Models that cast at each use, such as torchtitan's experts, then show one input where they have one.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, is_mutation
from ep_fx.graph.aliases import aliases_of
from ep_fx.graph.effects import written_by
from ep_fx.graph.info import info_of
from ep_fx.targets.npu.lowering import Lowering


def _apply(graph: ParallelGraph) -> None:
    known: dict[Any, fx.Node] = {}
    written = {value for node in graph if is_mutation(node) for value in written_by(node)}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if not written.isdisjoint(aliases_of(node)):
            continue
        key = node.args, tuple(sorted(node.kwargs.items(), key=str)), info_of(node).phase
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


CASTS = Lowering(
    name="casts",
    takes="aten._to_copy of one value with the same arguments",
    emits=(),
    fallback="none is needed",
    source="equal results",
    apply=_apply,
)
