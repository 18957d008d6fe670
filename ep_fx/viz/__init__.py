"""Pictures of a graph: `visualize` writes the format that the file's suffix names."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ep_fx.graph import ParallelGraph
from ep_fx.graph.printer import print_graph
from ep_fx.viz.build import build_picture
from ep_fx.viz.dot import to_dot
from ep_fx.viz.html import to_html
from ep_fx.viz.model import Picture
from ep_fx.viz.svg import to_svg

__all__ = ["Picture", "build_picture", "to_dot", "to_html", "to_svg", "visualize"]

_WRITERS: dict[str, Callable[[ParallelGraph], str]] = {
    ".svg": lambda graph: to_svg(build_picture(graph)),
    ".html": to_html,
    ".dot": lambda graph: to_dot(build_picture(graph)),
    ".txt": print_graph,
}


def visualize(graph: ParallelGraph, path: str | Path) -> Path:
    """Writes a picture of `graph`.

    Args:
        path: the file; ``.svg`` a drawing, ``.html`` a page with search and details, ``.dot`` Graphviz text, ``.txt``
            the text form. Missing folders are made.

    Returns:
        The path.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        known = ", ".join(_WRITERS)
        raise ValueError(f"{path}: the suffix says what to write; expected one of {known}, got {path.suffix!r}")
    text = writer(graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
