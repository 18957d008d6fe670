"""`Golden`: a graph against a file beside the test: all of it, the nodes that a selector takes, or a list of patterns.

A file never holds what a test cannot be about: source lines, and the numbers of what is computed. Where a selector
restricts it, values are numbered among the selected nodes, parameters have their own names, and every other value is
``%_``: the file changes with what it is about, and with nothing else.
"""
from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, cast

from torch import fx

from ep_fx.graph import Role, role_of
from ep_fx.graph.info import info_of
from ep_fx.graph.printer import GraphText, print_graph
from ep_fx.testing.assertions.matches import matches_of
from ep_fx.testing.graph_index import GraphIndex, index_of
from ep_fx.testing.patterns import check_patterns, has_directives
from ep_fx.testing.select import Selector
from ep_fx.testing.selector_text import as_selector

_SOURCE = re.compile(r" \([^()\s]+:\d+\)$", re.MULTILINE)
_ONLY_SOURCE = re.compile(r"  # \([^()\s]+:\d+\)$", re.MULTILINE)
_NUMBER = re.compile(r"_\d+$")
_PARAMETER = re.compile(r"^p\d+")


class Golden:
    """The golden files of one test module.

    Args:
        folder: where they lie.
        update: write them instead of comparing; files with patterns are written by hand and always compared.
    """

    def __init__(self, folder: Path, update: bool = False) -> None:
        self.folder, self.update = folder, update

    def __call__(self, graph: Any, name: str, select: Selector | str | None = None, *, types: bool = True) -> None:
        """Compares a graph, a transformed module, or a text with the file called `name`.

        Args:
            name: of the file in `folder`; ``.txt`` is added where it has no suffix.
            select: only these nodes.
            types: whether the text shows the types of values.

        Raises:
            AssertionError: it differs, or there is no such file.
        """
        __tracebackhide__ = True
        text = graph if isinstance(graph, str) else golden_text(graph, select, types=types)
        path = self.folder / (name if Path(name).suffix else f"{name}.txt")
        wanted = path.read_text() if path.exists() else None
        if wanted is not None and has_directives(wanted):
            check_patterns(text, wanted, str(path))
        elif self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif wanted is None:
            raise AssertionError(f"no golden file {path}; make it with pytest --update-golden")
        elif text != wanted:
            diff = difflib.unified_diff(wanted.splitlines(), text.splitlines(), str(path), "the graph", "", "", 2, "")
            hint = "if that is wished: pytest --update-golden, and read the diff of the file"
            raise AssertionError("\n".join([f"the graph differs from {path.name}; {hint}", *diff]))


def golden_text(graph: Any, select: Selector | str | None = None, *, types: bool = True) -> str:
    """The text of a graph, or of the nodes that a selector takes, as golden files hold it."""
    index = index_of(graph)
    if select is None:
        text = print_graph(index.graph, types=types).split("\ncomputes:")[0]
        return _without_sources(text).rstrip("\n") + "\n"
    found = {node for match in matches_of(index, as_selector(select)) for node in match.nodes}
    chosen = [fact.node for fact in index.facts if fact.node in found]
    writer = GraphText(index.graph, types)
    writer.names.update(_names(index, writer, chosen))
    lines: list[str] = []
    half = None
    for node in chosen:
        if node.op != "placeholder" and info_of(node).phase is not half:
            half = info_of(node).phase
            lines += ["", f"{half.value}:"] if lines else [f"{half.value}:"]
        lines.append(f"  {writer.line(node)}")
    return _without_sources("\n".join(lines)) + "\n"


def _without_sources(text: str) -> str:
    return _SOURCE.sub("", _ONLY_SOURCE.sub("", text))


def _names(index: GraphIndex, writer: GraphText, chosen: list[fx.Node]) -> dict[fx.Node, str]:
    """Names that depend on the chosen nodes alone."""
    names: dict[fx.Node, str] = {}
    taken: dict[str, int] = {}
    inside, old_names = set(chosen), writer.names
    for fact in index.facts:
        node, old = fact.node, old_names[fact.node]
        spec = writer.places.parameters.get(node) or writer.places.gradients.get(node)
        base = _NUMBER.sub("", old) if node.op != "placeholder" else old
        if spec is not None:
            base = _PARAMETER.sub(lambda _, name=spec.name: name, base)  # type: ignore[misc]
        elif role_of(node) is Role.GETITEM:
            container = cast(fx.Node, node.args[0])
            base = f"{names[container]}{_NUMBER.sub('', old.removeprefix(old_names[container]))}"
        if node in inside:
            taken[base] = taken.get(base, -1) + 1
            names[node] = f"{base}_{taken[base]}" if taken[base] else base
        else:
            names[node] = base if spec is not None or node.op == "placeholder" else "_"
    return names
