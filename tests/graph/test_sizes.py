"""Typical sizes: the rows of a region are those that its router sends, on every mesh, before and after the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from torch import fx

from ep_fx.graph import ParallelGraph, Role, parse_graph
from ep_fx.graph.printer import print_graph
from ep_fx.graph.sizes import TypicalSizes
from ep_fx.testing.synthetic import Sizes, logical_step, parallel_step

MESHES = [{"fsdp": 2, "ep": 1}, {"fsdp": 1, "ep": 2}, {"fsdp": 2, "ep": 2}, {"fsdp": 4, "ep": 1}]


@pytest.mark.parametrize("make", [logical_step, parallel_step])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("read_back", [False, True])
def test_as_many_rows_are_counted_as_are_sent_on_every_mesh(
    make: Callable[[int, Sizes], ParallelGraph], mesh: dict[str, int], read_back: bool
) -> None:
    graph = make(1, Sizes(**mesh))
    graph = parse_graph(print_graph(graph)) if read_back else graph
    sizes = TypicalSizes(graph)
    starts = [*graph.nodes(Role.SEND_ROWS), *graph.nodes(Role.DISPATCH)]
    sent = {sizes.shape(_argument(node).meta["val"])[0] for node in starts}
    assert sent == {10}
    for role in (Role.GROUPED_MM, Role.GROUPED_MM_BACKWARD):
        nodes = graph.nodes(role)
        assert nodes
        assert {sizes.shape(_argument(node).meta["val"])[0] for node in nodes} == sent


def _argument(node: fx.Node) -> fx.Node:
    return cast(fx.Node, node.args[0])
