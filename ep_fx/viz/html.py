"""A picture as one HTML page that needs no network: folded and full picture, search, details, the text form.

The page is a Jinja2 template with its style and script inlined; data goes in as JSON that cannot end the script.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup

from ep_fx.graph import ParallelGraph
from ep_fx.graph.printer import GraphText, print_graph
from ep_fx.graph.summary import format_summary, summarise
from ep_fx.viz.build import build_picture
from ep_fx.viz.model import Picture
from ep_fx.viz.palette import BOXES
from ep_fx.viz.svg import to_svg

_TEMPLATES = Path(__file__).parent / "templates"
MOST_NODES = 4000
"""A larger graph is shown folded only: a browser moves no more boxes smoothly."""


def to_html(graph: ParallelGraph) -> str:
    """The page of `graph`."""
    text = GraphText(graph)
    views = [("blocks", build_picture(graph, text=text))]
    if len(graph.graph.nodes) <= MOST_NODES:
        views.append(("all nodes", build_picture(graph, fold=False, text=text)))
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=select_autoescape(["html"]))
    return environment.get_template("picture.html").render(
        title="ep_fx graph",
        subtitle=views[0][1].subtitle,
        views=[{"name": name, "svg": Markup(to_svg(p, f"arrow{i}"))} for i, (name, p) in enumerate(views)],
        data=_script_safe([_data(picture) for _, picture in views]),
        style=Markup((_TEMPLATES / "picture.css").read_text()),
        script=Markup((_TEMPLATES / "picture.js").read_text()),
        text=print_graph(graph),
        summary=format_summary(summarise(graph)),
    )


def _data(picture: Picture) -> list[dict[str, Any]]:
    return [
        {"title": n.title, "subtitle": n.subtitle, "kind": n.kind.value, "phase": n.phase.value,
         "color": BOXES[n.kind].stroke, "members": n.members, "details": n.details}
        for n in picture.nodes
    ]


def _script_safe(value: Any) -> Markup:
    """JSON for a script element: no ``<``, ``>`` or ``&`` stands in it literally."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
