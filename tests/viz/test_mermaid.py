"""``.md``: a mermaid flowchart of one layer; every line is one that mermaid's flowchart grammar knows."""

from __future__ import annotations

import re
from dataclasses import replace

import networkx as nx
import pytest

from ep_fx.graph import ParallelGraph, info_of, set_info
from ep_fx.testing.synthetic import Sizes, parallel_step
from ep_fx.viz import to_mermaid

_LABEL = r'"(?:[^"<>#`\n]|<br/>|#(?:\w+);)*"'
_LINES = [
    re.compile(pattern)
    for pattern in (
        r"flowchart TB",
        r"  subgraph (forward|backward)",
        r"  end",
        rf"    (?P<box>n\d+)\[{_LABEL}\]:::(?P<used>\w+)",
        rf"  (?P<stub>s\d+)\(\[{_LABEL}\]\)",
        r"  (?P<source>[ns]\d+) (-->|==>|-\.->|-\.-o) (?P<target>[ns]\d+)",
        r"  classDef (?P<made>\w+) (fill|stroke|color|stroke-dasharray):[#\w ]+(,[a-z-]+:[#\w ]+)*",
    )
]


def parse(text: str) -> dict[str, set[str]]:
    """The names in the chart by what they are; fails on a line that is no flowchart statement."""
    chart = re.search(r"```mermaid\n(.*?)```", text, re.S)
    assert chart is not None
    found: dict[str, set[str]] = {name: set() for name in ("box", "used", "stub", "source", "target", "made")}
    depth = 0
    for line in chart[1].splitlines():
        match = next((m for pattern in _LINES if (m := pattern.fullmatch(line))), None)
        assert match is not None, f"no flowchart statement: {line!r}"
        depth += line.startswith("  subgraph") - (line == "  end")
        for name, value in match.groupdict().items():
            found[name].add(value)
    assert depth == 0
    return found


@pytest.mark.parametrize("layer", [None, "layers.1"])
def test_one_moe_layer_with_both_halves_and_every_step_of_the_exchange(
    graph: ParallelGraph, layer: str | None
) -> None:
    text = to_mermaid(graph, layer)
    found = parse(text)
    assert text.startswith("# layers.1\n")
    assert found["source"] | found["target"] <= found["box"] | found["stub"]
    assert found["used"] <= found["made"]
    assert {"unshard", "dispatch", "context", "combine", "reshard", "reduce", "compute"} <= found["used"]
    assert "subgraph backward" in text
    assert "\n\nArrows: `-->` values, `==>` context of a dispatch, `-.->` kept for backward, `-.-o` order\n\n" in text
    assert len(found["box"] | found["stub"]) <= 60


def test_compute_is_cut_at_the_exchanges_so_that_no_arrows_go_round_in_a_circle(graph: ParallelGraph) -> None:
    arrows = re.findall(r"^  (n\d+) (?:-->|==>|-\.->|-\.-o) (n\d+)", to_mermaid(graph), re.M)
    assert len(arrows) > 20
    assert nx.is_directed_acyclic_graph(nx.DiGraph(arrows))


def test_a_dense_layer_has_no_exchange(graph: ParallelGraph) -> None:
    assert not parse(to_mermaid(graph, "layers.0"))["used"] & {"dispatch", "combine"}


def test_names_that_mermaid_would_read_as_syntax_are_escaped() -> None:
    graph = parallel_step(1, Sizes())
    for node in graph:
        info = info_of(node)
        if info.fqn == "layers.0":
            set_info(node, replace(info, fqn='layers.0.a"]<b>#end`'))
    parse(to_mermaid(graph))


def test_an_unknown_layer_is_refused_with_near_misses(graph: ParallelGraph) -> None:
    with pytest.raises(ValueError, match=r"no layer 'layer.1'; did you mean .*'layers.1'"):
        to_mermaid(graph, "layer.1")
