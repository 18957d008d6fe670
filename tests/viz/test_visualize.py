"""`visualize`: the suffix decides."""
from __future__ import annotations

from pathlib import Path

import pytest

from ep_fx.graph import ParallelGraph
from ep_fx.viz import visualize


@pytest.mark.parametrize(
    ("name", "start"), [("g.svg", "<svg"), ("g.html", "<!doctype html>"), ("g.DOT", "digraph"), ("g.txt", "graph of ")]
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
    with pytest.raises(ValueError, match=r"\.svg, \.html, \.dot, \.txt"):
        visualize(graph, tmp_path / name)
    assert not list(tmp_path.iterdir())
