"""The sample graph and its pictures, built once."""
from __future__ import annotations

import pytest

from ep_fx.graph import ParallelGraph
from ep_fx.viz import Picture, build_picture
from tests.viz import sample


@pytest.fixture(scope="package")
def graph() -> ParallelGraph:
    return sample.build()


@pytest.fixture(scope="package")
def folded(graph: ParallelGraph) -> Picture:
    return build_picture(graph)


@pytest.fixture(scope="package")
def unfolded(graph: ParallelGraph) -> Picture:
    return build_picture(graph, fold=False)
