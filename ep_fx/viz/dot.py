"""A picture as Graphviz text: one cluster for each half and block of the model, the colours of the other formats."""
from __future__ import annotations

from ep_fx.viz.model import EdgeKind, Kind, Picture, PictureNode
from ep_fx.viz.palette import ARROWS, BAND, BAND_LINE, BOXES

_SHAPE = {Kind.PLACEHOLDER: "ellipse", Kind.OUTPUT: "ellipse"}


def to_dot(picture: Picture) -> str:
    """The ``digraph`` of `picture`."""
    lines = [
        "digraph ep_fx {",
        f"  label={_quoted(f'{picture.title}: {picture.subtitle}')}; labelloc=t; fontname=Helvetica; compound=true;",
        "  node [shape=box, style=\"rounded,filled\", fontname=Helvetica, fontsize=11];",
        "  edge [arrowsize=0.6];",
    ]
    clusters: dict[tuple[str, str], list[int]] = {}
    for index, node in enumerate(picture.nodes):
        clusters.setdefault((node.phase.value, node.band), []).append(index)
    for number, ((phase, band), members) in enumerate(clusters.items()):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f"    label={_quoted(f'{band}, {phase}')}; style=\"rounded,filled\";")
        lines.append(f'    color="{BAND_LINE}"; fillcolor="{BAND}";')
        lines += [f"    n{index} [{_node(picture.nodes[index])}];" for index in members]
        lines.append("  }")
    for edge in picture.edges:
        arrow = ARROWS[edge.kind]
        style = ', style="dashed"' if arrow.dash else ""
        loose = ", constraint=false" if edge.kind in (EdgeKind.SAVED, EdgeKind.CONTEXT) else ""
        lines.append(
            f'  n{edge.source} -> n{edge.target} [class="{edge.kind.value}", color="{arrow.stroke}", '
            f"penwidth={arrow.width}{style}{loose}];"
        )
    return "\n".join([*lines, "}"]) + "\n"


def _node(node: PictureNode) -> str:
    box = BOXES[node.kind]
    label = f"{node.title}\n{node.subtitle}" if node.subtitle else node.title
    about = "\n".join(f"{name}: {text}" for name, text in node.details if name != "nodes")
    style = "rounded,filled,dashed" if box.dashed else "rounded,filled"
    return (
        f'label={_quoted(label)}, tooltip={_quoted(about or node.title)}, class="{node.kind.value}", '
        f'shape={_SHAPE.get(node.kind, "box")}, style="{style}", fillcolor="{box.fill}", color="{box.stroke}"'
    )


def _quoted(text: str) -> str:
    """A Graphviz string: quotes and backslashes escaped, line breaks kept."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "").replace("\n", "\\n") + '"'
