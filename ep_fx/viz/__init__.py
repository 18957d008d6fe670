"""Pictures of a graph: `visualize` writes the format that the file's suffix names."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ep_fx.graph import History, ParallelGraph, PassRecord
from ep_fx.graph.printer import print_graph
from ep_fx.viz.build import build_picture
from ep_fx.viz.dot import to_dot
from ep_fx.viz.graphml import to_graphml
from ep_fx.viz.html import to_html
from ep_fx.viz.mermaid import to_mermaid
from ep_fx.viz.model import Picture
from ep_fx.viz.model_explorer import to_model_explorer
from ep_fx.viz.perfetto import to_perfetto
from ep_fx.viz.svg import to_svg

__all__ = [
    "SUFFIXES", "Picture", "build_picture", "suffix_of", "to_dot", "to_graphml", "to_html", "to_mermaid",
    "to_model_explorer", "to_perfetto", "to_svg", "visualize",
]

_WRITERS: dict[str, Callable[[ParallelGraph], str]] = {
    ".svg": lambda graph: to_svg(build_picture(graph)),
    ".html": to_html,
    ".dot": lambda graph: to_dot(build_picture(graph)),
    ".txt": print_graph,
    ".md": to_mermaid,
    ".perfetto.json": to_perfetto,
    ".json": to_model_explorer,
    ".graphml": to_graphml,
}
SUFFIXES = tuple(_WRITERS)
"""The suffixes that `visualize` knows."""


def visualize(
    graph: ParallelGraph,
    path: str | Path,
    *,
    layer: str | None = None,
    records: Sequence[PassRecord] = (),
    history: History | None = None,
) -> Path:
    """Writes a picture of `graph`.

    Args:
        path: the file. Missing folders are made. Its suffix says what is written: ``.svg`` a drawing, ``.html`` a page
            with views of structure, schedule and passes, ``.dot`` Graphviz text, ``.txt`` the text form, ``.md`` a
            mermaid chart of one layer, ``.json`` the graph for Google's Model Explorer, ``.graphml`` for networkx and
            Gephi, ``.perfetto.json`` a timeline for ui.perfetto.dev.
        layer: for ``.md``: the module path of the block; None: the first with experts.
        records, history: of the passes that made the graph: the page shows what each changed.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, or `layer` is no block of the model, or given for a format that shows all layers;
            `history` is not of this graph.
    """
    path = Path(path)
    suffix = suffix_of(path)
    if layer is not None and suffix != ".md":
        raise ValueError(f"{path}: layer={layer!r} goes with a .md file, which shows one layer; {suffix} shows all")
    if suffix == ".html":
        text = to_html(graph, records, history)
    else:
        text = to_mermaid(graph, layer) if suffix == ".md" else _WRITERS[suffix](graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def suffix_of(path: Path) -> str:
    """The suffix of `path` that `visualize` knows.

    Raises:
        ValueError: it knows none.
    """
    for suffix in SUFFIXES:  # the longer of two stands first
        if path.name.lower().endswith(suffix):
            return suffix
    known = ", ".join(_WRITERS)
    raise ValueError(f"{path}: the suffix says what to write; expected one of {known}, got {path.suffix!r}")
