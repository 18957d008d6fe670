"""The nominal timeline: compute waits for collectives, collectives for their lane, and sizes decide how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep_fx.cost.timeline import Lane, Machine, flops, moved, timeline
from ep_fx.graph import ParallelGraph, Role, is_collective, role_of, target_name
from ep_fx.graph.sizes import TypicalSizes
from ep_fx.testing.synthetic import Sizes, parallel_step
from tests.viz import sample

SIZES = Sizes()


@pytest.fixture(scope="module")
def graph() -> ParallelGraph:
    return parallel_step(2, SIZES)


def test_every_collective_starts_when_it_is_issued_and_a_wait_ends_when_it_has_arrived(graph: ParallelGraph) -> None:
    line = timeline(graph)
    slices = {piece.node: piece for piece in line.slices}
    passed = 0.0
    for node in graph:
        if is_collective(node):
            assert slices[node].start >= passed
        if role_of(node) is Role.UNSHARD_WAIT:
            started = slices[node.args[0]]  # type: ignore[index]
            assert line.passed[node] == pytest.approx(max(passed, started.start + started.duration))
        passed = line.passed[node]


def test_a_faster_network_stalls_less_and_the_work_stays_the_same(graph: ParallelGraph) -> None:
    slow, fast = (timeline(graph, replace(Machine(), network=n, latency=0.0)) for n in (1e6, 1e12))
    assert fast.stalled < slow.stalled / 100
    work = [sum(s.duration for s in line.slices if s.lane is Lane.COMPUTE and not s.stalled) for line in (slow, fast)]
    assert work[0] == pytest.approx(work[1])
    assert fast.seconds >= work[1]


def test_flops_of_a_product_are_two_for_each_multiplication(graph: ParallelGraph) -> None:
    sizes = TypicalSizes(graph)
    products = [node for node in graph if target_name(node) == "aten::mm"]
    assert products
    for node in products:
        (m, k), (k_too, n) = (sizes.shape(value.meta["val"]) for value in node.args)  # type: ignore[union-attr]
        assert k == k_too
        assert flops(node, sizes) == 2 * m * n * k
    backward = next(node for node in graph if role_of(node) is Role.GROUPED_MM_BACKWARD)
    rows, width = sizes.shape(backward.args[0].meta["val"])  # type: ignore[union-attr]
    assert flops(backward, sizes) == 4 * rows * width * sizes.shape(backward.args[1].meta["val"])[1]  # type: ignore[union-attr]


def test_typical_sizes_are_those_of_the_trace_and_of_balanced_routing() -> None:
    graph = sample.build()
    sizes = TypicalSizes(graph)
    context = graph.nodes(Role.CONTEXT)[0]
    sent = sizes.number(context.args[2].meta["val"])  # type: ignore[union-attr]
    exchange = next(node for node in graph.nodes(Role.EXCHANGE) if role_of(node.args[0]) is Role.SEND_ROWS)  # type: ignore[arg-type]
    assert sent == sample.TOP_K * 6 * 2 * sample.EXPERTS  # tokens of the sample's trace
    assert sizes.shape(exchange.meta["val"]) == (sent, sample.WIDTH)
    assert moved(exchange, sizes) == sent * sample.WIDTH * 4
