"""From a `ParallelGraph` to a `Picture`: boxes, bands, arrows."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Phase, Role, find_regions, info_of, role_of
from ep_fx.graph.effects import effect_edges
from ep_fx.graph.places import Places
from ep_fx.graph.printer import GraphText
from ep_fx.graph.texts import block_of, mesh_text, plural
from ep_fx.viz.boxes import Box, Boxes
from ep_fx.viz.labels import Labels
from ep_fx.viz.model import EdgeKind, Kind, Lane, Picture, PictureEdge, PictureNode

_STRENGTH = [EdgeKind.CONTEXT, EdgeKind.DATA, EdgeKind.SAVED, EdgeKind.EFFECT]
"""Of several arrows between two boxes the first of these is drawn."""
_OPENS_EXCHANGE = (Role.DISPATCH, Role.COMBINE_BACKWARD, Role.SEND_ROWS)
_CONTEXT_OF_DISPATCH = (3, 4)
"""Results of a logical dispatch that are its context: permuted_indices and splits."""


def build_picture(graph: ParallelGraph, *, fold: bool = True, text: GraphText | None = None) -> Picture:
    """The picture of `graph`.

    Args:
        fold: nodes of one module and phase share a box; dispatch, combine, context, unshard, reshard, reductions and
            exchanges keep their own.
        text: the graph's text, where it is known already.
    """
    text = text or GraphText(graph)
    boxes, labels = Boxes(text, fold), Labels(text, fold)
    bands = _bands(boxes.all)
    nodes = []
    for box, band in zip(boxes.all, bands, strict=True):
        node = PictureNode(box.kind, box.phase, box.lane, box.module, band)
        node.title, node.subtitle, node.details = labels.title(box, band), labels.subtitle(box), labels.details(box)
        node.members = [text.names[n] for n in (*box.stored, *box.nodes)]
        nodes.append(node)
    edges = _edges(graph, text.places, boxes, fold)
    _split_output(nodes, edges, fold)
    ran = " \u00b7 ".join(graph.provides) or "no pass"
    subtitle = f"{mesh_text(graph.manifest.mesh)} \u00b7 {plural(len(graph.graph.nodes), 'node')} \u00b7 passes: {ran}"
    return Picture("ep_fx graph", subtitle, nodes, edges, fold)


# -- bands -------------------------------------------------------------------------------------------------------------
def _bands(boxes: list[Box]) -> list[str]:
    """The block of the model that each box belongs to; a gather stands with what runs after it, a free, reduction or
    wait with what ran before, so that the picture shows the order of the run."""
    bands = [_own_block(box) for box in boxes]
    homes: dict[str, str] = {}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        members = [i for i, box in enumerate(boxes) if box.phase is phase]
        blocks = [i for i in members if bands[i]]
        if not blocks:
            continue
        previous = None
        for i in members:
            if boxes[i].kind in (Kind.PLACEHOLDER, Kind.OUTPUT) and (boxes[i].lane is Lane.MAIN or not boxes[i].nodes):
                bands[i] = FIRST if phase is Phase.FORWARD and boxes[i].kind is Kind.PLACEHOLDER else LAST
                continue
            if bands[i] is None and boxes[i].lane is not Lane.UNIT:
                bands[i] = homes.get(boxes[i].module) or _rest(i, blocks[0], blocks[-1], previous, phase)
            if bands[i] is not None:
                previous = bands[i]
                homes.setdefault(boxes[i].module, previous or "")
        _adopt_units(members, boxes, bands)
    return [band or "" for band in bands]


def _own_block(box: Box) -> str | None:
    if box.lane is Lane.UNIT or not any(part.isdigit() for part in box.module.split(".")):
        return None
    return block_of(box.module)


FIRST, LAST = "before the blocks", "after the blocks"


def _rest(i: int, first: int, last: int, previous: str | None, phase: Phase) -> str | None:
    """The band of a box outside every block: before the first block, behind the last, or that of its neighbour."""
    outer = (FIRST, LAST) if phase is Phase.FORWARD else (LAST, FIRST)
    return outer[0] if i < first else outer[1] if i > last else previous


def _adopt_units(members: list[int], boxes: list[Box], bands: list[str | None]) -> None:
    following = None
    for i in reversed(members):
        if bands[i] is not None:
            following = bands[i]
        elif boxes[i].kind in (Kind.UNSHARD, Kind.PLACEHOLDER):
            bands[i] = following
    previous = following
    for i in members:
        if bands[i] is None:
            bands[i] = previous
        previous = bands[i]


# -- arrows ------------------------------------------------------------------------------------------------------------
def _edges(graph: ParallelGraph, places: Places, boxes: Boxes, fold: bool) -> list[PictureEdge]:
    kinds: dict[tuple[int, int], EdgeKind] = {}
    for source, target, kind in (*_data(graph, boxes, fold), *_order(graph, places)):
        pair = boxes.owner.get(source), boxes.owner.get(target)
        if pair[0] is None or pair[1] is None or pair[0] == pair[1]:
            continue
        known = kinds.get((pair[0], pair[1]), kind)
        kinds[pair[0], pair[1]] = min(known, kind, key=_STRENGTH.index)
    return [PictureEdge(source, target, kind) for (source, target), kind in sorted(kinds.items(), key=lambda i: i[0])]


def edges_between(graph: ParallelGraph, places: Places) -> Iterator[tuple[fx.Node, fx.Node, EdgeKind]]:
    """All arrows of the graph, node by node: values (sizes left out), contexts, values kept for backward, order."""
    for node in graph:
        backward = info_of(node).phase is Phase.BACKWARD
        for source in node.all_input_nodes:
            if _is_size(source) or role_of(node) is Role.RESHARD:
                continue
            crosses = backward and source.op != "placeholder" and info_of(source).phase is Phase.FORWARD
            yield source, node, EdgeKind.CONTEXT if _is_context(source) else (
                EdgeKind.SAVED if crosses else EdgeKind.DATA
            )
    yield from _order(graph, places)


def _data(graph: ParallelGraph, boxes: Boxes, fold: bool) -> Iterator[tuple[fx.Node, fx.Node, EdgeKind]]:
    for node in graph:
        if role_of(node) is Role.RESHARD and fold:
            continue                                      # what it frees is told by the order arrows
        backward = boxes.all[boxes.owner[node]].phase is Phase.BACKWARD if node in boxes.owner else False
        for source in node.all_input_nodes:
            if _is_size(source):
                continue                                  # sizes go everywhere; the lines of the text show them
            crosses = backward and source in boxes.owner and boxes.all[boxes.owner[source]].phase is Phase.FORWARD
            yield source, node, EdgeKind.CONTEXT if _is_context(source) else (
                EdgeKind.SAVED if crosses and source.op != "placeholder" else EdgeKind.DATA
            )


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt) and role_of(node) is not Role.GETITEM


def _is_context(node: fx.Node) -> bool:
    if role_of(node) is not Role.GETITEM:
        return role_of(node) is Role.CONTEXT
    source, index = node.args
    assert isinstance(source, fx.Node)
    role = role_of(source)
    return role is Role.CONTEXT or (role is Role.DISPATCH and index in _CONTEXT_OF_DISPATCH)


def _order(graph: ParallelGraph, places: Places) -> Iterator[tuple[fx.Node, fx.Node, EdgeKind]]:
    """What must wait for what without taking its value: frees for the last reader, and a region inside its gather."""
    position = graph.positions()
    last: dict[fx.Node, fx.Node] = {}
    for before, after, _ in effect_edges(graph):
        if role_of(after) is not Role.RESHARD:
            yield before, after, EdgeKind.EFFECT
        elif after not in last or position[last[after]] < position[before]:
            last[after] = before
    units = {region.name: region.unit for region in graph.manifest.regions}
    unit_nodes = _unit_nodes(graph, places)
    for region in find_regions(graph):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            first, final = region.first(phase), region.last(phase)
            if first is None or final is None:
                continue
            start = next((n for n in region.members[phase] if role_of(n) in _OPENS_EXCHANGE), first)
            for node in unit_nodes.get((units.get(region.name, ""), phase), ()):
                if role_of(node) is Role.UNSHARD and position[node] < position[first]:
                    yield node, start, EdgeKind.EFFECT
                if role_of(node) is Role.RESHARD and position[last.get(node, node)] < position[final] < position[node]:
                    last[node] = final
    for after, before in last.items():
        yield before, after, EdgeKind.EFFECT


def _unit_nodes(graph: ParallelGraph, places: Places) -> dict[tuple[str, Phase], list[fx.Node]]:
    found: dict[tuple[str, Phase], list[fx.Node]] = {}
    for node in graph:
        if role_of(node) in (Role.UNSHARD, Role.RESHARD):
            found.setdefault((places.unit(node) or "", info_of(node).phase), []).append(node)
    return found


def _split_output(nodes: list[PictureNode], edges: list[PictureEdge], fold: bool) -> None:
    """Gives the gradients that the graph returns a box of their own, in the backward column."""
    output = next(i for i, node in enumerate(nodes) if node.kind is Kind.OUTPUT)
    returned = [e for e in edges if e.target == output and nodes[e.source].is_backward]
    if not returned:
        return
    edges[:] = [e for e in edges if e not in returned]
    if fold:
        return
    band = nodes[returned[-1].source].band
    box = PictureNode(Kind.OUTPUT, Phase.BACKWARD, Lane.UNIT, "", band, "gradients", members=nodes[output].members)
    nodes.append(box)
    edges += [PictureEdge(e.source, len(nodes) - 1, e.kind) for e in returned]
