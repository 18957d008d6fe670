"""Which nodes of the graph share a box of the picture.

Unfolded, every node has its own. Folded, compute of one module shares a box, and so does the plumbing of one gather,
reduction or exchange (pads, waits that nothing overlaps, elements of lists); each dispatch, combine, context, unshard,
reshard, reduction and exchange keeps a box of its own.

A node joins a box only if all its arguments lie in that box or in earlier ones: then arrows between boxes form no
cycle. One walk, O(nodes).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ep_fx.graph import Phase, Role, info_of, role_of
from ep_fx.graph.places import REGION_ACTIONS, Action
from ep_fx.graph.printer import GraphText
from ep_fx.graph.roles import target_name
from ep_fx.graph.texts import block_of
from ep_fx.viz.model import Kind, Lane

VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "t", "view", "reshape", "transpose", "expand", "unsqueeze", "squeeze", "slice", "alias", "detach", "permute",
        "_unsafe_view", "clone", "_to_copy", "lift_fresh_copy", "select", "unbind", "split", "sym_size",
    )
)
"""Operators that move data at most: no box is named for them."""
_WAITS = frozenset({Role.WAIT, Role.UNSHARD_WAIT, Role.REDUCE_GRAD_WAIT})
_FOLLOWS_ARGUMENT = frozenset(
    {Role.ASSEMBLE, Role.UNPAD_SHARD, Role.SCALE_GRAD, Role.ALL_REDUCE_GRAD, Role.REGROUP, Role.PAD_ROWS}
)
ROUTING = frozenset({Role.PERMUTE, Role.PERMUTE_BACKWARD, Role.UNPERMUTE, Role.UNPERMUTE_BACKWARD})
_OWN_BOX = ROUTING | {
    Role.CONTEXT, Role.DISPATCH, Role.DISPATCH_BACKWARD, Role.COMBINE, Role.COMBINE_BACKWARD, Role.RESHARD, Role.OUTPUT
}
_UNIT_KINDS = {Action.GATHER: Kind.UNSHARD, Action.FREE: Kind.RESHARD, Action.REDUCE: Kind.REDUCE}
_REGION_KINDS = {
    Action.DISPATCH: Kind.DISPATCH, Action.DISPATCH_BACKWARD: Kind.DISPATCH,
    Action.COMBINE: Kind.COMBINE, Action.COMBINE_BACKWARD: Kind.COMBINE,
}


@dataclass
class Box:
    """Nodes that share a box, in order; `stored` are parameters, buffers and constants that it reads first."""

    kind: Kind
    phase: Phase
    lane: Lane
    module: str
    nodes: list[fx.Node] = field(default_factory=list)
    stored: list[fx.Node] = field(default_factory=list)


class Boxes:
    """The boxes of a graph.

    Args:
        text: the graph's text, which knows names and places.
        fold: whether nodes share boxes.
    """

    def __init__(self, text: GraphText, fold: bool) -> None:
        self._text, self._fold, self._places = text, fold, text.places
        self.all: list[Box] = []
        self.owner: dict[fx.Node, int] = {}
        """Index of the box of each node; stored values have none where they were folded."""
        self._open: dict[tuple[object, ...], int] = {}
        self._computed = 0
        self._started: dict[fx.Node, int] = {}
        self._shown: set[fx.Node] = set()
        self._path: dict[Phase, str] = {Phase.FORWARD: "", Phase.BACKWARD: ""}
        self._paths = ModulePaths(text)
        self._stored = {n for n in text.graph if n.op == "get_attr" or self._is_stored(n)}
        for node in text.graph:
            if node not in self._stored:
                self._visit(node)
        self._gathers_first()
        unused = [node for node in text.graph if node in self._stored and not node.users]
        if unused:
            self.all.append(Box(Kind.PLACEHOLDER, Phase.FORWARD, Lane.UNIT, "", [], unused))

    def _is_stored(self, node: fx.Node) -> bool:
        manifest = self._text.graph.manifest
        dynamic = {*manifest.inputs, *manifest.tangents}
        known = {p.placeholder for p in manifest.parameters} | {b.placeholder for b in manifest.buffers}
        return node.op == "placeholder" and node.target not in dynamic and node.target in known

    def _visit(self, node: fx.Node) -> None:
        stored = [n for n in node.all_input_nodes if n in self._stored and n not in self._shown]
        self._shown.update(stored)
        if not self._fold:
            for value in stored:
                self._add(Box(Kind.PLACEHOLDER, info_of(node).phase, Lane.UNIT, ""), value)
            self._add(self._box(node, self._module(node)), node)
            return
        choices = [self._shared(node), self._of_view(node)]
        index = next((i for i in choices if i is not None and self._fits(node, i)), None)
        if index is None:
            index = self._add(self._box(node, self._module(node)), node)
            if role_of(node) not in ROUTING:
                self._open[self._key(node)] = index
        else:
            self._place(node, index)
        self.all[index].stored += stored
        self._computed += self.all[index].kind is Kind.COMPUTE and not _is_plumbing(node)
        self._started[node] = self._computed

    def _add(self, box: Box, node: fx.Node) -> int:
        self.all.append(box)
        self._place(node, len(self.all) - 1)
        return len(self.all) - 1

    def _place(self, node: fx.Node, index: int) -> None:
        self.owner[node] = index
        self.all[index].nodes.append(node)

    def _fits(self, node: fx.Node, index: int) -> bool:
        """Whether no argument lies in a later box; a gather depends on nothing, so it does not count."""
        owners = [self.owner[n] for n in node.all_input_nodes if n in self.owner]
        return all(o <= index or self.all[o].kind is Kind.UNSHARD for o in owners)

    def _of_view(self, node: fx.Node) -> int | None:
        """For a node that only looks at one value: the compute box of that value."""
        sources = [n for n in node.all_input_nodes if n in self.owner and not _is_plumbing(n)]
        if len(sources) != 1 or target_name(node) not in VIEWS:
            return None
        index = self.owner[sources[0]]
        return index if self.all[index].kind is Kind.COMPUTE else None

    def _gathers_first(self) -> None:
        """Puts each gather in front of the first box that reads it."""
        places = [float(i) for i in range(len(self.all))]
        for node, index in self.owner.items():
            for source in node.all_input_nodes:
                owner = self.owner.get(source, index)
                if self.all[owner].kind is Kind.UNSHARD and index < places[owner]:
                    places[owner] = index - 0.5
        order = sorted(range(len(self.all)), key=places.__getitem__)
        self.all = [self.all[i] for i in order]
        new = {old: place for place, old in enumerate(order)}
        self.owner = {node: new[index] for node, index in self.owner.items()}

    # -- which box -------------------------------------------------------------------------------------------------
    def _shared(self, node: fx.Node) -> int | None:
        """The box that `node` would join: that of its argument, or the open one of what it is part of."""
        role = role_of(node)
        sources = [self.owner[n] for n in node.all_input_nodes if n in self.owner]
        if role in _OWN_BOX or node.op == "placeholder":
            return None
        if _is_plumbing(node):
            return max(sources, default=None)
        if role in _WAITS:
            start = node.all_input_nodes[0]
            return self.owner[start] if self._started[start] == self._computed else None
        if role in _FOLLOWS_ARGUMENT:
            return max((self.owner[n] for n in _first_nodes(node) if n in self.owner), default=None)
        if role is Role.EXCHANGE:
            source = node.all_input_nodes[0]
            return self.owner[source] if role_of(source) in (Role.SEND_ROWS, Role.UNGROUP) else None
        if role in (Role.SEND_ROWS, Role.UNGROUP, Role.TP_SUM, Role.ALL_REDUCE):
            return None
        index = self._open.get(self._key(node))
        if role in (Role.PAD_SHARD, Role.UNSHARD) and index is not None and self._has(index, Role.UNSHARD):
            return None
        if role in (Role.DISASSEMBLE, Role.REDUCE_GRAD) and index is not None and self._has(index, Role.REDUCE_GRAD):
            return None
        return index

    def _has(self, index: int, role: Role) -> bool:
        return any(role_of(n) is role for n in self.all[index].nodes)

    def _key(self, node: fx.Node) -> tuple[object, ...]:
        return (info_of(node).phase, self._places[node].action, self._module(node))

    def _module(self, node: fx.Node) -> str:
        place, phase = self._places[node], info_of(node).phase
        if place.action is not Action.COMPUTE:
            return place.subject or ""
        if info_of(node).fqn is not None:
            fqn = info_of(node).fqn or ""
            self._path[phase] = self._paths.folded(fqn) if self._fold else fqn
        return self._path[phase]

    def _box(self, node: fx.Node, module: str) -> Box:
        role, action, phase = role_of(node), self._places[node].action, info_of(node).phase
        if node.op == "placeholder":
            is_tangent = node.target in self._text.graph.manifest.tangents
            return Box(Kind.PLACEHOLDER, Phase.BACKWARD if is_tangent else Phase.FORWARD, Lane.MAIN, "")
        if node.op == "output":
            return Box(Kind.OUTPUT, Phase.FORWARD, Lane.MAIN, "")
        if action in _UNIT_KINDS:
            return Box(Kind.WAIT if role in _WAITS else _UNIT_KINDS[action], phase, Lane.UNIT, module)
        if action in REGION_ACTIONS:
            return self._region_box(node, module)
        if action is Action.SUM:
            return Box(Kind.WAIT if role is Role.WAIT else Kind.SUM, phase, Lane.MAIN, module)
        return Box(Kind.COMPUTE, phase, Lane.MAIN, module)

    def _region_box(self, node: fx.Node, module: str) -> Box:
        role, phase = role_of(node), info_of(node).phase
        source = node.args[0] if role is Role.GETITEM else node
        if isinstance(source, fx.Node) and role_of(source) is Role.CONTEXT:
            return Box(Kind.CONTEXT, phase, Lane.CONTEXT, module)
        start = node.all_input_nodes[0] if role is Role.WAIT else node
        if self._places.exchange_part(start) == "counts":
            return Box(Kind.WAIT if role is Role.WAIT else Kind.EXCHANGE, phase, Lane.CONTEXT, module)
        kind = Kind.WAIT if role is Role.WAIT else _REGION_KINDS[self._places[node].action]
        return Box(kind, phase, Lane.MAIN, module)


class ModulePaths:
    """How far a module path is cut for folding: to the outermost module that holds no unit, region or block."""

    def __init__(self, text: GraphText) -> None:
        manifest = text.graph.manifest
        blocks = {block_of(fqn) for node in text.graph if (fqn := info_of(node).fqn) and _has_index(fqn)}
        inner = {p.unit for p in manifest.parameters} | {r.name for r in manifest.regions} | blocks
        self._kept = blocks | {path[:end] for path in inner for end in _ends(path)[:-1]}

    def folded(self, fqn: str) -> str:
        """The path of the box that compute of module `fqn` goes to."""
        return next((fqn[:end] for end in _ends(fqn) if fqn[:end] not in self._kept), fqn)


def _has_index(fqn: str) -> bool:
    return any(part.isdigit() for part in fqn.split("."))


def _ends(path: str) -> list[int]:
    return [i for i, char in enumerate(path) if char == "."] + [len(path)]


def _first_nodes(node: fx.Node) -> Sequence[fx.Node]:
    first = node.args[0]
    return [first] if isinstance(first, fx.Node) else node.all_input_nodes


def _is_plumbing(node: fx.Node) -> bool:
    """Elements of results, and sizes: no work of their own."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return role_of(node) is Role.GETITEM or isinstance(node.meta.get("val"), symbols)
