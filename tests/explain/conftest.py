"""The sample step: embedding, a dense layer, an MoE layer, head, on fsdp 2 x ep 2."""

from __future__ import annotations

import pytest

from ep_fx.explain import Explanation, explain
from ep_fx.graph import ParallelGraph
from tests.viz import sample


@pytest.fixture(scope="package")
def graph() -> ParallelGraph:
    return sample.build()


@pytest.fixture(scope="package")
def explanation(graph: ParallelGraph) -> Explanation:
    return explain(graph)
