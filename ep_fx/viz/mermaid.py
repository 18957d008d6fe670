"""One layer as a Markdown page with a mermaid flowchart, which GitHub, GitLab and most wikis draw in place.

Boxes and arrows are those of the picture (`build_picture`), of one block of the model: forward, backward, and a stub
for each block that it takes values from or hands values to. Compute is folded to the parts of the layer, and cut at
each exchange, so that no arrows go round in a circle.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ep_fx.graph import ParallelGraph, Phase
from ep_fx.graph.texts import block_of
from ep_fx.viz.build import build_picture
from ep_fx.viz.model import EdgeKind, Kind, Picture, PictureNode
from ep_fx.viz.palette import ARROWS, BOXES

_ARROWS = {EdgeKind.DATA: "-->", EdgeKind.CONTEXT: "==>", EdgeKind.SAVED: "-.->", EdgeKind.EFFECT: "-.-o"}
_ESCAPES = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "\n": " ", "`": "#96;"}


def to_mermaid(graph: ParallelGraph, layer: str | None = None) -> str:
    """The Markdown text.

    Args:
        layer: module path of the block, such as ``model.layers.3``; None: the first with an MoE region, else the first.

    Raises:
        ValueError: the model has no block of that name.
    """
    picture = build_picture(graph)
    blocks = list(dict.fromkeys(node.band for node in picture.nodes if node.band))
    if layer is None:
        moe = [block_of(region.name) for region in graph.manifest.regions]
        layer = next((block for block in (*moe, *blocks) if block in blocks), "")
    elif layer not in blocks:
        near = difflib.get_close_matches(layer, blocks, 3) or blocks[:8]
        raise ValueError(f"the graph has no layer {layer!r}; did you mean {', '.join(map(repr, near))}?")
    chart = _Chart(picture, layer)
    return f"# {layer or 'ep_fx graph'}\n\n{picture.subtitle}\n\n{chart.legend()}\n\n```mermaid\n{chart.text()}```\n"


class _Chart:
    """The flowchart of one band of a picture."""

    def __init__(self, picture: Picture, layer: str) -> None:
        self.picture, self.layer = picture, layer
        self.boxes: dict[str, PictureNode] = {}
        self.titles: dict[str, str] = {}
        self.stubs: dict[str, str] = {}
        self._ids: dict[tuple[str, ...], str] = {}
        self._exchanges = 0
        self.owner = {i: self._box(i, node) for i, node in enumerate(picture.nodes) if node.band == layer}

    def _box(self, index: int, node: PictureNode) -> str:
        """Id of the box that stands for box `index` of the picture: its part of the layer, where it computes."""
        if node.kind is not Kind.COMPUTE:
            self._exchanges += node.kind in (Kind.DISPATCH, Kind.COMBINE)
            title = f"{node.title}<br/>{node.subtitle}" if node.subtitle else node.title
            return self._add((str(index),), node, title)
        inside = node.module.removeprefix(self.layer).strip(".").split(".")[0]
        key = (node.phase.value, inside, str(self._exchanges))
        return self._add(key, node, inside or self.layer or node.title)

    def _add(self, key: tuple[str, ...], node: PictureNode, title: str) -> str:
        name = self._ids.setdefault(key, f"n{len(self._ids)}")
        self.boxes.setdefault(name, node)
        self.titles.setdefault(name, "<br/>".join(_escaped(part) for part in title.split("<br/>")))
        return name

    def text(self) -> str:
        arrows = self._arrows()
        lines = ["flowchart TB"]
        for phase in Phase:
            members = [name for name, node in self.boxes.items() if node.phase is phase]
            if members:
                lines.append(f"  subgraph {phase.value}")
                lines += [f'    {n}["{self.titles[n]}"]:::{self.boxes[n].kind.value}' for n in members]
                lines.append("  end")
        lines += [f'  {name}(["{_escaped(title)}"])' for title, name in self.stubs.items()]
        lines += [f"  {source} {arrow} {target}" for source, target, arrow in arrows]
        lines += list(_classes({node.kind for node in self.boxes.values()}))
        return "\n".join(lines) + "\n"

    def legend(self) -> str:
        """One line: what the kinds of arrows in the chart say."""
        used = {arrow for _, _, arrow in self._arrows()}
        return "Arrows: " + ", ".join(
            f"`{arrow}` {ARROWS[kind].legend}" for kind, arrow in _ARROWS.items() if arrow in used
        )

    def _arrows(self) -> list[tuple[str, str, str]]:
        """One arrow between two boxes, the strongest; what leaves the layer ends at a stub."""
        found: dict[tuple[str, str], EdgeKind] = {}
        order = list(_ARROWS)
        for edge in self.picture.edges:
            ends = (self.owner.get(edge.source), self.owner.get(edge.target))
            if ends == (None, None) or (None in ends and edge.kind is not EdgeKind.DATA):
                continue
            source = ends[0] or self._stub(edge.source, "from")
            target = ends[1] or self._stub(edge.target, "to")
            if source != target:
                known = found.get((source, target), edge.kind)
                found[source, target] = min(known, edge.kind, key=order.index)
        return [(source, target, _ARROWS[kind]) for (source, target), kind in found.items()]

    def _stub(self, index: int, word: str) -> str:
        node = self.picture.nodes[index]
        title = f"{word} {node.band or node.title}, {node.phase.value}"
        return self.stubs.setdefault(title, f"s{len(self.stubs)}")


def _classes(kinds: Iterable[Kind]) -> Iterable[str]:
    for kind in sorted(kinds, key=lambda kind: kind.value):
        style = BOXES[kind]
        dashes = ",stroke-dasharray:4 3" if style.dashed else ""
        yield f"  classDef {kind.value} fill:{style.fill},stroke:{style.stroke},color:#0f172a{dashes}"


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)
