"""What runs each node of a lowered graph, and whether everything inside of the MoE regions runs on the device.

    npu kernel      one of torch_npu's fused operators
    aten            an operator of ATen with a kernel in torch_npu, or composed of such
    composition     of the dialect, or of this target: made of such operators
    collective      communication, and the wait for it
    host            sizes and elements of results: nothing runs on the device
    fallback        a line of the table left it as it was, or has none for it; with the reason
    cpu fallback    torch_npu copies its operands to the CPU and the result back
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Phase, Role, info_of, is_collective, is_mutation, role_of
from ep_fx.graph.names import value_names
from ep_fx.graph.operators import target_text
from ep_fx.graph.places import Places
from ep_fx.targets.npu.aten import has_kernel
from ep_fx.targets.npu.kernels import COMPOSITIONS, KERNELS
from ep_fx.targets.npu.lowering import kept_reason


class Kind(Enum):
    """What runs a node."""

    KERNEL = "npu kernel"
    ATEN = "aten"
    COMPOSITION = "composition"
    COLLECTIVE = "collective"
    HOST = "host"
    FALLBACK = "fallback"
    CPU = "cpu fallback"


FALLBACKS = frozenset({Kind.FALLBACK, Kind.CPU})
_WAITS = frozenset({Role.WAIT, Role.UNSHARD_WAIT, Role.REDUCE_GRAD_WAIT})
_MADE_OF_ATEN = frozenset(
    {
        Role.DISPATCH, Role.DISPATCH_BACKWARD, Role.COMBINE, Role.COMBINE_BACKWARD, Role.SEND_ROWS, Role.PAD_ROWS,
        Role.TP_SHARE, Role.TP_SUM, Role.PAD_SHARD, Role.ASSEMBLE, Role.RESHARD, Role.DISASSEMBLE, Role.SCALE_GRAD,
        Role.UNPAD_SHARD,
    }
)
"""Nodes of the dialect that no line of the table takes: their kernels move rows and blocks by operators of ATen."""
_ROUTING = frozenset(
    {
        Role.PERMUTE, Role.PERMUTE_BACKWARD, Role.UNPERMUTE, Role.UNPERMUTE_BACKWARD, Role.REGROUP, Role.UNGROUP,
        Role.GROUPED_MM, Role.GROUPED_MM_BACKWARD, Role.ADD_BIAS, Role.ADD_BIAS_BACKWARD,
    }
)
_LAST = frozenset({Role.PAD_ROWS, Role.COMBINE, Role.DISPATCH_BACKWARD})
_BEHIND = frozenset({Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.DISASSEMBLE, Role.SCALE_GRAD, Role.OUTPUT})


@dataclass(frozen=True)
class Row:
    """What runs one node.

    Args:
        node, target: its name in the printed graph, and what it calls.
        kind: what runs it.
        reason: why it is a fallback, or writes in place; None where neither is so.
        region: the MoE region that it is inside of, in forward or in backward; None: outside.
        phase, module, source: where it comes from.
    """

    node: str
    target: str
    kind: Kind
    reason: str | None
    region: str | None
    phase: Phase
    module: str | None
    source: str | None


class FallbackError(ValueError):
    """A node inside of an MoE region does not run on the device's own kernels."""


def coverage(graph: ParallelGraph) -> tuple[Row, ...]:
    """A row for each node of a lowered graph that calls something, in order."""
    regions, names = region_nodes(graph), value_names(graph, Places(graph))
    rows = []
    for node in graph:
        if node.op == "call_function":
            kind, reason = runs_by(node)
            info = info_of(node)
            where = regions.get(node), info.phase, info.fqn, info.source
            rows.append(Row(names[node], target_text(node.target), kind, reason, *where))
    return tuple(rows)


def require_kernels(rows: Iterable[Row]) -> None:
    """Checks that no node inside of an MoE region is a fallback.

    Raises:
        FallbackError: names each such node, its module and source, and why.
    """
    found = [row for row in rows if row.region is not None and row.kind in FALLBACKS]
    if not found:
        return
    lines = [
        f"  %{row.node} = {row.target}, {row.phase.value} of {row.region!r}, module {row.module or 'root'!r} "
        f"({row.source or 'source unknown'}): {row.reason}"
        for row in found
    ]
    raise FallbackError(
        f"{len(found)} nodes inside of MoE regions have no kernel on the NPU; expected none:\n" + "\n".join(lines)
    )


def _no_kernel(target: torch._ops.OpOverload) -> str:
    if target._schema.name.removesuffix("_backward").endswith("_for_cpu"):
        return "the graph was captured for the CPU; one that is captured for target npu keeps attention whole"
    return "torch_npu has no kernel of it, and PyTorch does not compose it of others"


def runs_by(node: fx.Node) -> tuple[Kind, str | None]:
    """What runs `node`, a call of a function, and why it is a fallback."""
    role, target = role_of(node), node.target
    reason = kept_reason(node)
    if is_collective(node) or role in _WAITS:
        return Kind.COLLECTIVE, None
    name = getattr(target, "__name__", "")
    for functions, kind in ((KERNELS, Kind.KERNEL), (COMPOSITIONS, Kind.COMPOSITION)):
        if functions.get(name) is target:
            return kind, None
    if not isinstance(target, torch._ops.OpOverload) or _is_size(node):
        return (Kind.FALLBACK, reason or "the dialect's own") if role is Role.CONTEXT else (Kind.HOST, None)
    if target.namespace == "aten":
        if not has_kernel(target):
            return Kind.CPU, reason or _no_kernel(target)
        writes = is_mutation(node)  # a write that stays one has a kernel all the same
        return (Kind.FALLBACK if reason is not None and not writes else Kind.ATEN), reason
    if role in _MADE_OF_ATEN and reason is None:
        return Kind.COMPOSITION, None
    return Kind.FALLBACK, reason or "no line of the table takes it: the dialect's own kernel"


def _is_size(node: fx.Node) -> bool:
    """Whether the result is a number that the host has already; such lead out of a region."""
    return isinstance(node.target, torch._ops.OpOverload) and str(node.target).startswith("aten.sym_")


def region_nodes(graph: ParallelGraph) -> dict[fx.Node, str]:
    """The nodes inside of each MoE region, forward and backward, and its name: what is computed from its exchange up
    to the rows that leave it and the gradients of its parameters. Routing of the dialect belongs to it too."""
    found: dict[fx.Node, str] = {}
    for source in (*graph.nodes(Role.CONTEXT), *graph.nodes(Role.DISPATCH)):
        name = next(str(value) for value in reversed(source.args) if isinstance(value, str))
        stack = [source]
        while stack:
            node = stack.pop()
            if node in found or role_of(node) in _BEHIND or _is_size(node):
                continue
            found[node] = name
            if role_of(node) not in _LAST:
                stack.extend(node.users)
    for node in graph:
        if role_of(node) in _ROUTING and node not in found:
            found[node] = info_of(node).fqn or "routing"
    return found

