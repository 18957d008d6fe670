"""`visualize`: the suffix decides."""
from __future__ import annotations

from pathlib import Path

import pytest

from ep_fx.graph import ParallelGraph
from ep_fx.viz import visualize


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("g.svg", "<svg"),
        ("g.html", "<!doctype html>"),
        ("g.DOT", "digraph"),
        ("g.txt", "graph of "),
        ("g.md", "# layers.1"),
        ("g.json", '{"label":'),
        ("g.perfetto.json", '{"displayTimeUnit":'),
        ("g.graphml", "<?xml"),
    ],
)
def test_writes_by_suffix_and_makes_folders(graph: ParallelGraph, tmp_path: Path, name: str, start: str) -> None:
    """API-4."""
    path = visualize(graph, tmp_path / "new" / "folder" / name)
    assert path == tmp_path / "new" / "folder" / name
    assert path.read_text(encoding="utf-8").startswith(start)


def test_takes_a_string(graph: ParallelGraph, tmp_path: Path) -> None:
    assert visualize(graph, f"{tmp_path}/g.txt").exists()


@pytest.mark.parametrize("name", ["g.png", "g"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(graph: ParallelGraph, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.svg, \.html, \.dot, \.txt, \.md, \.perfetto\.json, \.json, \.graphml"):
        visualize(graph, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_layer_goes_with_markdown_only(graph: ParallelGraph, tmp_path: Path) -> None:
    assert visualize(graph, tmp_path / "g.md", layer="layers.0").read_text(encoding="utf-8").startswith("# layers.0")
    with pytest.raises(ValueError, match=r"layer='layers.0' goes with a \.md file"):
        visualize(graph, tmp_path / "g.svg", layer="layers.0")
