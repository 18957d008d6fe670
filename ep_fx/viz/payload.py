"""A graph as the page reads it: columns of numbers and one pool of strings, so that 20,000 nodes stay below 6 MB.

    nodes     name op type path source group params bytes kind phase atom wait    one entry a node; texts by pool number
    atoms     title, second line, lane of what the folded picture draws as one: a gather with its wait, a dispatch, ..
    edges     source target kind                                                  as in the folded picture
    lives     unit start end bytes                                                one for each gathering of a unit
    memory    position bytes                                                      where the bytes gathered change
    times     the host's clock at each node, and start and duration of what runs, on a nominal machine; nanoseconds
    passes    records, notes of nodes that are gone, order and moves after each   where a history is known
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from ep_fx.cost import live_unsharded_bytes, lives
from ep_fx.cost.timeline import timeline
from ep_fx.graph import History, ParallelGraph, PassRecord, Phase, Role, info_of, is_collective, role_of
from ep_fx.graph.places import Action, group_argument
from ep_fx.graph.printer import GraphText
from ep_fx.graph.roles import WAIT_OF, target_name
from ep_fx.graph.summary import moved_bytes
from ep_fx.graph.texts import group_text, source_text
from ep_fx.graph.values import bytes_of
from ep_fx.viz.boxes import Boxes
from ep_fx.viz.build import edges_between
from ep_fx.viz.labels import Labels
from ep_fx.viz.model import EdgeKind, Kind, Lane
from ep_fx.viz.palette import ARROWS, BOXES

KINDS, EDGES = list(Kind), list(EdgeKind)
STORED = "(parameters and buffers)"
"""The group of values that outlive a step."""
_COLUMNS = ("name", "op", "type", "path", "source", "group", "params", "bytes", "kind", "phase", "atom", "wait")


class Pool:
    """Numbers for strings; the same string has one number."""

    def __init__(self) -> None:
        self.strings: list[str] = [""]
        self._numbers = {"": 0}

    def __call__(self, text: str | None) -> int:
        """The number of `text`; 0 for nothing."""
        if not text:
            return 0
        if text not in self._numbers:
            self._numbers[text] = len(self.strings)
            self.strings.append(text)
        return self._numbers[text]


def payload(
    graph: ParallelGraph, text: GraphText, records: Sequence[PassRecord], history: History | None
) -> dict[str, Any]:
    """What the page shows, as JSON takes it.

    Raises:
        ValueError: `history` is not of this graph.
    """
    pool = Pool()
    boxes = Boxes(text, fold=True)
    index = graph.positions()
    parts = {
        "kinds": [[k.value, BOXES[k].fill, BOXES[k].stroke, BOXES[k].legend] for k in KINDS],
        "arrows": [[k.value, ARROWS[k].stroke, ARROWS[k].legend] for k in EDGES],
        "nodes": _nodes(graph, text, boxes, pool),
        "atoms": _atoms(boxes, Labels(text, True), pool),
        "edges": _edges(graph, text, index),
        "lives": [[pool(life.unit), life.start, life.end, life.bytes] for life in lives(graph)],
        "memory": _memory(graph),
        "times": _times(graph, index),
        "passes": None if history is None else _passes(graph, records, history, pool),
    }
    return {"strings": pool.strings, **parts}


# -- nodes -------------------------------------------------------------------------------------------------------------
def _nodes(graph: ParallelGraph, text: GraphText, boxes: Boxes, pool: Pool) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    stored = {node: number for number, box in enumerate(boxes.all) for node in box.stored}
    positions = graph.positions()
    last = {Phase.FORWARD: "", Phase.BACKWARD: ""}
    for node in graph:
        phase = _phase(graph, node)
        number = boxes.owner.get(node, stored.get(node, -1))
        path = STORED if _is_stored(graph, node) else _path(text, node, last[phase])
        if text.places[node].action is Action.COMPUTE and node.op == "call_function":
            last[phase] = path
        group = group_argument(node)
        row = (
            text.names[node],
            pool(target_name(node) if node.op == "call_function" else str(node.target)),
            pool(text.symbols.type(node.meta.get("val"))),
            pool(path),
            pool(source_text(source) if (source := info_of(node).source) else ""),
            pool(group_text(group, graph.manifest.mesh) if group else ""),
            pool(", ".join(_parameters(text, node))),
            _bytes(text, node, pool),
            KINDS.index(_kind(node, boxes)),
            int(phase is Phase.BACKWARD),
            number,
            max((positions[u] for u in node.users if role_of(u) is WAIT_OF.get(role_of(node))), default=-1),
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


def _is_stored(graph: ParallelGraph, node: fx.Node) -> bool:
    manifest = graph.manifest
    return node.op == "placeholder" and node.target not in (*manifest.inputs, *manifest.tangents)


def _phase(graph: ParallelGraph, node: fx.Node) -> Phase:
    """The column that shows the node; that of the outputs is forward, whatever comes last."""
    if node.op == "placeholder":
        return Phase.BACKWARD if node.target in graph.manifest.tangents else Phase.FORWARD
    return Phase.FORWARD if node.op == "output" else info_of(node).phase


def _path(text: GraphText, node: fx.Node, last: str) -> str:
    """The module that the node is shown in: of an FSDP node its unit, of an exchange its region."""
    place = text.places[node]
    if node.op == "output":
        return ""
    if place.action is Action.COMPUTE:
        return last if place.subject is None else place.subject
    units = (place.subject or "").split(", ")
    parts: list[str] = []
    for level in zip(*(unit.split(".") for unit in units), strict=False):
        if len(set(level)) > 1:
            break
        parts.append(level[0])
    return "" if parts == ["root"] else ".".join(parts)


def _kind(node: fx.Node, boxes: Boxes) -> Kind:
    if node.op in ("placeholder", "get_attr"):
        return Kind.PLACEHOLDER
    kind = boxes.all[boxes.owner[node]].kind
    if node.op == "call_function" and kind in (Kind.PLACEHOLDER, Kind.OUTPUT):
        return Kind.COMPUTE                               # it shares the box of an input
    return Kind.WAIT if role_of(node) in WAIT_OF.values() else kind


def _parameters(text: GraphText, node: fx.Node) -> list[str]:
    spec = text.places.parameters.get(node) or text.places.gradients.get(node)
    return [spec.name] if spec else [p.name for p in text.places.lists.get(node, ())]


def _bytes(text: GraphText, node: fx.Node, pool: Pool) -> int | str:
    """Bytes that a collective moves on one rank, of the value for other nodes; a formula where sizes are symbols."""
    value = node.meta.get("val")
    size = moved_bytes(node, text.places, text.symbols) if is_collective(node) else bytes_of(value)
    if size is None or isinstance(size, int):
        return size or 0
    renamed = text.symbols.rename(size)
    return int(renamed) if isinstance(renamed, int) or renamed.is_number else str(renamed)


# -- atoms and arrows --------------------------------------------------------------------------------------------------
def _atoms(boxes: Boxes, labels: Labels, pool: Pool) -> list[list[int]]:
    """Title, second line and lane of each box of the folded picture; no text for compute: the page folds by module."""
    found = []
    for box in boxes.all:
        plain = box.kind is Kind.COMPUTE or (box.lane is Lane.MAIN and box.kind is Kind.PLACEHOLDER)
        lane = list(Lane).index(box.lane)
        found.append([0, 0, lane] if plain else [pool(labels.title(box, box.module)), pool(labels.subtitle(box)), lane])
    return found


def _edges(graph: ParallelGraph, text: GraphText, index: Mapping[fx.Node, int]) -> list[list[int]]:
    """Sources, targets and kinds."""
    found = [(index[a], index[b], EDGES.index(kind)) for a, b, kind in edges_between(graph, text.places)]
    return [list(column) for column in zip(*found, strict=True)] or [[], [], []]


# -- time and memory ---------------------------------------------------------------------------------------------------
def _memory(graph: ParallelGraph) -> list[list[int]]:
    points: list[list[int]] = []
    for position, (_, alive) in enumerate(live_unsharded_bytes(graph)):
        if not points or points[-1][1] != alive:
            points.append([position, alive])
    return points


def _times(graph: ParallelGraph, index: Mapping[fx.Node, int]) -> dict[str, list[int]]:
    """`clock`: how much later the host is past each node than past the one before; `slices`: node, start, duration."""
    line = timeline(graph)
    passed = [round(line.passed[node] * 1e9) for node in graph]
    slices = [(index[s.node], round(s.start * 1e9), round(s.duration * 1e9)) for s in line.slices]
    return {
        "clock": [later - earlier for earlier, later in pairwise([0, *passed])],
        "slices": [number for piece in slices for number in piece],
    }


# -- passes ------------------------------------------------------------------------------------------------------------
_REMOVED_KINDS = {
    Role.DISPATCH: Kind.DISPATCH, Role.DISPATCH_BACKWARD: Kind.DISPATCH, Role.COMBINE: Kind.COMBINE,
    Role.COMBINE_BACKWARD: Kind.COMBINE, Role.CONTEXT: Kind.CONTEXT, Role.EXCHANGE: Kind.EXCHANGE,
    Role.UNSHARD: Kind.UNSHARD, Role.RESHARD: Kind.RESHARD, Role.REDUCE_GRAD: Kind.REDUCE,
    Role.ALL_REDUCE_GRAD: Kind.REDUCE, Role.TP_SUM: Kind.SUM, Role.WAIT: Kind.WAIT, Role.UNSHARD_WAIT: Kind.WAIT,
    Role.REDUCE_GRAD_WAIT: Kind.WAIT,
}
"""Kinds of nodes that a later pass erased, of which nothing but the target is left."""
_ROLES = {role.value: role for role in Role}


def _passes(
    graph: ParallelGraph, records: Sequence[PassRecord], history: History, pool: Pool
) -> dict[str, Any]:
    nodes, last = list(graph), history.orders[-1] if history.orders else []
    if [history.notes[number].name for number in last] != [node.name for node in nodes]:
        raise ValueError(f"the history ends with {len(last)} nodes, which are not the {len(nodes)} of this graph")
    place = {number: position for position, number in enumerate(last)}
    gone = {number: note for number, note in enumerate(history.notes) if number not in place}
    return {
        "records": [
            [r.name, round(r.seconds * 1e3, 3), round(r.check_seconds * 1e3, 3), r.added, r.removed, r.moved]
            for r in records
        ],
        "place": [place.get(number, -1) for number in range(len(history.notes))],
        "gone": [
            [n.name, pool(n.target), pool(n.fqn), int(n.phase is Phase.BACKWARD),
             KINDS.index(_REMOVED_KINDS.get(_ROLES.get(n.target, Role.OTHER), Kind.COMPUTE))]
            for n in gone.values()
        ],
        "orders": [_runs(order) for order in history.orders],
        "moved": [list(moved) for moved in history.moved],
    }


def _runs(order: Sequence[int]) -> list[int]:
    """``first, length, first, length, ..`` of runs of consecutive numbers."""
    runs: list[int] = []
    for number in order:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs
