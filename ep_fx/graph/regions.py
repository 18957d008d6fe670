"""Where each MoE region lies in the graph, recomputed from the data flow of its context.

A region is one dispatch and what takes its context: combine, and in backward combine_backward and dispatch_backward,
as single nodes (`splits` edge) or lowered to exchanges (edges from one `dispatch_context`).
"""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ep_fx.graph.info import Phase, info_of
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import Role, role_of

_LOGICAL = (Role.COMBINE, Role.COMBINE_BACKWARD, Role.DISPATCH_BACKWARD)
_LOWERED = (Role.SEND_ROWS, Role.EXCHANGE, Role.WAIT, Role.REGROUP, Role.UNGROUP, Role.PAD_ROWS)


@dataclass
class RegionNodes:
    """The nodes of one region.

    Args:
        name: the region's name, an argument of its dispatch.
        source: the logical dispatch node or the `dispatch_context` node.
        members: all its exchange nodes of each phase, in graph order.
    """

    name: str
    source: fx.Node
    members: dict[Phase, list[fx.Node]] = field(default_factory=dict)

    def first(self, phase: Phase) -> fx.Node | None:
        """First node of the region's exchange in `phase`: dispatch, or combine_backward."""
        return next(iter(self.members.get(phase, [])), None)

    def last(self, phase: Phase) -> fx.Node | None:
        """Last node of the region's exchange in `phase`: combine, or dispatch_backward."""
        return next(reversed(self.members.get(phase, [])), None)


def find_regions(graph: ParallelGraph) -> list[RegionNodes]:
    """All regions, in order of their dispatch."""
    position = graph.positions()
    regions = []
    for node in graph:
        role = role_of(node)
        if role not in (Role.DISPATCH, Role.CONTEXT):
            continue
        members = _logical(node) if role is Role.DISPATCH else _lowered(node)
        region = RegionNodes(str(node.args[-1]), node)
        for member in sorted(members, key=position.__getitem__):
            region.members.setdefault(info_of(member).phase, []).append(member)
        regions.append(region)
    return regions


def _logical(dispatch: fx.Node) -> set[fx.Node]:
    return {dispatch} | {u for item in dispatch.users for u in item.users if role_of(u) in _LOGICAL}


def _lowered(context: fx.Node) -> set[fx.Node]:
    """Everything between a use of a context value and the end of its exchange."""
    members = {context}
    stack = [user for item in context.users for user in item.users]
    while stack:
        node = stack.pop()
        if node in members or role_of(node) not in _LOWERED:
            continue
        members.add(node)
        if role_of(node) in (Role.SEND_ROWS, Role.UNGROUP, Role.EXCHANGE, Role.WAIT):
            stack.extend(node.users)
    counts = context.args[1]
    while isinstance(counts, fx.Node) and role_of(counts) in (Role.WAIT, Role.EXCHANGE):
        members.add(counts)
        counts = counts.args[0]
    return members
