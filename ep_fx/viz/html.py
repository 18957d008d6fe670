"""A graph as one HTML page that needs no network: structure, schedule, passes, and the text form, with search.

The page is a template with its style, its scripts and its data inlined. The scripts are ES modules, several short
files; `bundle` joins them, so that the page opens from a file. Data goes in as JSON that cannot end the script.
"""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup

from ep_fx.graph import History, ParallelGraph, PassRecord
from ep_fx.graph.printer import GraphText, print_graph
from ep_fx.graph.summary import format_summary, summarise
from ep_fx.graph.texts import mesh_text, plural
from ep_fx.viz.payload import payload

_TEMPLATES = Path(__file__).parent / "templates"
_IMPORT = re.compile(r"^import (\{[^}]*\}) from '\./([\w-]+)\.js';\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:const|class|function) (\w+))", re.MULTILINE)


def to_html(
    graph: ParallelGraph, records: Sequence[PassRecord] = (), history: History | None = None
) -> str:
    """The page of `graph`.

    Args:
        records, history: of the passes that made the graph, for the view of the passes.

    Raises:
        ValueError: `history` is not of this graph.
    """
    text = GraphText(graph)
    data = payload(graph, text, records, history)
    data |= {"text": print_graph(graph), "summary": format_summary(summarise(graph))}
    ran = " \u00b7 ".join(graph.provides) or "no pass"
    nodes = plural(len(graph.graph.nodes), "node")
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=select_autoescape(["html"]))
    return environment.get_template("page.html").render(
        title="ep_fx graph",
        subtitle=f"{mesh_text(graph.manifest.mesh)} \u00b7 {nodes} \u00b7 passes: {ran}",
        data=_script_safe(data),
        style=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(bundle(_TEMPLATES / "js" / "main.js")),
    )


def bundle(entry: Path) -> str:
    """The module `entry` and all that it imports as one script: each in a scope of its own, after what it imports."""
    parts: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in parts:
            return
        source = (entry.parent / f"{name}.js").read_text(encoding="utf-8")
        for match in _IMPORT.finditer(source):
            visit(match[2])
        exported = ", ".join(match[2] for match in _EXPORT.finditer(source))
        body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = \2_js;\n", source))
        parts[name] = f"const {name}_js = (() => {{\n{body}return {{{exported}}};\n}})();\n"

    visit(entry.stem)
    return "'use strict';\n" + "".join(parts.values())


def _script_safe(value: Any) -> Markup:
    """JSON for a script element: no ``<``, ``>`` or ``&`` stands in it literally."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
