"""A picture as SVG: pure Python, no binary, valid XML that stands alone.

Boxes carry ``data-box``, arrows ``data-from`` and ``data-to``, both the classes of their kind and half, so that a
script can find them. A box's title shows its details where a viewer knows tooltips.
"""
from __future__ import annotations

import re
from xml.sax.saxutils import escape

from ep_fx.viz.layout import HEADER, MARGIN, Layout, Rect, lay_out
from ep_fx.viz.metrics import shortened, text_width
from ep_fx.viz.model import Kind, Picture, PictureNode
from ep_fx.viz.palette import ARROWS, BAND, BAND_LINE, BOXES, FAINT, FONT, INK
from ep_fx.viz.routes import paths

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ROUND = {Kind.PLACEHOLDER: 18, Kind.OUTPUT: 18}


def to_svg(picture: Picture, ids: str = "arrow") -> str:
    """The SVG document of `picture`; `ids` begins the ids in it, which differ where one page holds several."""
    layout = lay_out(picture)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" '
        f'width="{layout.width:.0f}" height="{layout.height:.0f}" style="max-width:100%;height:auto" '
        f'font-family="{FONT}" class="picture">',
        f"<style>{_style()}</style>",
        f"<defs>{_markers(ids)}</defs>",
        f'<rect width="{layout.width:.0f}" height="{layout.height:.0f}" fill="#ffffff"/>',
        *_header(picture, layout, ids),
        *_bands(layout),
        '<g class="edges">', *_edges(picture, layout, ids), "</g>",
        '<g class="nodes">', *(_box(i, node, layout.boxes[i]) for i, node in enumerate(picture.nodes)), "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def clean(text: str) -> str:
    """`text` escaped for XML, without characters that XML forbids."""
    return escape(_UNPRINTABLE.sub("?", text), {'"': "&quot;"})


def _style() -> str:
    rules = [
        f"text{{fill:{INK}}}", f".sub,.note{{fill:{FAINT}}}", ".box{stroke-width:1.3}", ".edge{fill:none}",
        ".t{font-size:12.5px;font-weight:600}", ".sub{font-size:10.5px}", ".note{font-size:12px}",
    ]
    for kind, box in BOXES.items():
        dash = ";stroke-dasharray:4 3" if box.dashed else ""
        rules.append(f".k-{kind.value} .box{{fill:{box.fill};stroke:{box.stroke}{dash}}}")
    for edge, arrow in ARROWS.items():
        dash = f";stroke-dasharray:{arrow.dash}" if arrow.dash else ""
        rules.append(f".e-{edge.value}{{stroke:{arrow.stroke};stroke-width:{arrow.width}{dash}}}")
    return "".join(rules)


def _markers(ids: str) -> str:
    return "".join(
        f'<marker id="{ids}-{kind.value}" viewBox="0 0 8 8" refX="7.4" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0.5,0.8L7.5,4L0.5,7.2z" fill="{arrow.stroke}"/></marker>'
        for kind, arrow in ARROWS.items()
    )


def _header(picture: Picture, layout: Layout, ids: str) -> list[str]:
    parts = [
        f'<g class="headline"><text x="{MARGIN}" y="34" font-size="19" font-weight="700">{clean(picture.title)}</text>'
        f'<text x="{MARGIN + text_width(picture.title, 19, True) + 14:.0f}" y="34" class="note">'
        f"{clean(picture.subtitle)}</text></g>",
        '<g class="legend">',
    ]
    present = {node.kind for node in picture.nodes}
    x = MARGIN
    for kind, box in BOXES.items():
        if kind in present and box.legend:
            parts.append(
                f'<g class="k-{kind.value}"><rect class="box" x="{x:.0f}" y="50" width="16" height="12" rx="3"/>'
                f'<text class="sub" x="{x + 22:.0f}" y="60">{clean(box.legend)}</text></g>'
            )
            x += 36 + text_width(box.legend, 10.5)
    used, x = {edge.kind for edge in picture.edges}, MARGIN
    for edge, arrow in ARROWS.items():
        if edge in used:
            parts.append(
                f'<path class="edge e-{edge.value}" d="M{x:.0f},79h26" marker-end="url(#{ids}-{edge.value})"/>'
                f'<text class="sub" x="{x + 33:.0f}" y="83">{clean(arrow.legend)}</text>'
            )
            x += 48 + text_width(arrow.legend, 10.5)
    parts.append("</g>")
    for label, middle in layout.columns:
        parts.append(
            f'<text x="{middle:.0f}" y="{HEADER - 10}" font-size="14" font-weight="700" text-anchor="middle">'
            f"{clean(label)}</text>"
        )
    return parts


def _bands(layout: Layout) -> list[str]:
    parts = []
    for label, r in layout.bands:
        parts.append(
            f'<rect x="{r.x:.1f}" y="{r.y:.1f}" width="{r.w:.1f}" height="{r.h:.1f}" rx="10" fill="{BAND}" '
            f'fill-opacity="0.6" stroke="{BAND_LINE}"/>'
            f'<text x="{r.x + 12:.1f}" y="{r.y + 19:.1f}" class="note" font-weight="600">{clean(label)}</text>'
        )
    return parts


def _edges(picture: Picture, layout: Layout, ids: str) -> list[str]:
    order = sorted(range(len(picture.edges)), key=lambda i: -list(ARROWS).index(picture.edges[i].kind))
    drawn = paths(picture, layout)
    return [
        f'<path class="edge e-{edge.kind.value}{_half(picture.nodes[edge.target])}" data-from="{edge.source}" '
        f'data-to="{edge.target}" d="{drawn[i]}" marker-end="url(#{ids}-{edge.kind.value})"/>'
        for i in order
        for edge in (picture.edges[i],)
    ]


def _title(title: str, room: float) -> str:
    """The title, its module path cut on the left where there is no room for all of it."""
    verb, space, path = title.rpartition(" ")
    if "." not in path:
        return shortened(title, room, 12.5, bold=True)
    head = verb + space
    return head + shortened(path, room - text_width(head, 12.5, bold=True), 12.5, bold=True, keep_end=True)


def _half(node: PictureNode) -> str:
    return f" {node.phase.value}"


def _box(index: int, node: PictureNode, r: Rect) -> str:
    room = r.w - 14
    title = _title(node.title, room)
    middle = r.cy + 4.5 if not node.subtitle else r.cy - 2.5
    lines = [f'<text class="t" x="{r.cx:.1f}" y="{middle:.1f}" text-anchor="middle">{clean(title)}</text>']
    if node.subtitle:
        text = shortened(node.subtitle, room, 10.5)
        lines.append(
            f'<text class="sub" x="{r.cx:.1f}" y="{r.cy + 12.5:.1f}" text-anchor="middle">{clean(text)}</text>'
        )
    about = [node.title, node.subtitle, *(f"{k}: {v}" for k, v in node.details if k != "nodes")]
    tip = clean("\n".join(line for line in about if line))
    return (
        f'<g class="node k-{node.kind.value}{_half(node)}" data-box="{index}"><title>{tip}</title>'
        f'<rect class="box" x="{r.x:.1f}" y="{r.y:.1f}" width="{r.w:.1f}" height="{r.h:.1f}" '
        f'rx="{_ROUND.get(node.kind, 6)}"/>{"".join(lines)}</g>'
    )
