"""What proving a graph costs: each structural rule, and each default pass, on graphs of 1,000 to 100,000 nodes.

    python -m benchmarks.verify [--repeat 3]

CPU microseconds a node, the least of the repetitions, without the garbage collector, whose passes over all objects of
the process are nobody's in particular. Slope: of log time over log nodes, between the smallest and the largest graph.
Memory: peak above the graph while the rules run, KB a node. Budgets: 10 us, slope 1.05, 5 KB.
"""
from __future__ import annotations

import argparse
import gc
import math
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ep_fx.graph import ParallelGraph, PassManager
from ep_fx.passes import default_pipeline
from ep_fx.testing.synthetic import layers_for, logical_step
from ep_fx.verify import verify

SIZES = (1_000, 10_000, 100_000)
BUDGET_MICROSECONDS, BUDGET_SLOPE, BUDGET_KB = 10.0, 1.05, 5.0


@dataclass
class Cost:
    """What one graph cost.

    Args:
        nodes: of the finished graph.
        passes, rules: CPU seconds of each, by name.
        verify: CPU seconds of all rules together.
        peak: bytes above the graph while they ran.
    """

    nodes: int
    passes: dict[str, float] = field(default_factory=dict)
    rules: dict[str, float] = field(default_factory=dict)
    verify: float = math.inf
    peak: int = 0


@contextmanager
def no_collector() -> Iterator[None]:
    """Keeps the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(nodes: int, repeat: int) -> Cost:
    """The cost of a synthetic step of about `nodes` nodes."""
    with no_collector():
        graph, passes = _passes(nodes)
    cost = Cost(len(graph.graph.nodes), passes)
    for _ in range(repeat):
        with no_collector():
            started = time.process_time()
            report = verify(graph).raise_if_broken()
            cost.verify = min(cost.verify, time.process_time() - started)
        for result in report.results:
            cost.rules[result.rule.id] = min(result.seconds, cost.rules.get(result.rule.id, math.inf))
    cost.peak = _peak(graph)
    return cost


def _passes(nodes: int) -> tuple[ParallelGraph, dict[str, float]]:
    manager = PassManager(default_pipeline())
    graph = manager.run(logical_step(layers_for(nodes)))
    seconds: dict[str, float] = {}
    for record in manager.records:
        seconds[record.name] = seconds.get(record.name, 0.0) + record.seconds
    return graph, seconds


def _peak(graph: ParallelGraph) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        verify(graph)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def report(costs: Sequence[Cost]) -> str:
    """The table: one line a rule, then all rules, memory, passes; a last column says how cost grows."""
    lines = [_line("us a node", [f"{c.nodes:,}" for c in costs], "slope")]
    for name in costs[-1].rules:
        lines.append(_costs(name, [(c.nodes, c.rules[name]) for c in costs]))
    lines.append(_costs("all rules", [(c.nodes, c.verify) for c in costs]))
    lines.append(_line("KB a node", [f"{c.peak / c.nodes / 1e3:.2f}" for c in costs], ""))
    lines += [_costs(f"pass {name}", [(c.nodes, c.passes[name]) for c in costs]) for name in costs[-1].passes]
    largest, slope = costs[-1], _slope([(c.nodes, c.verify) for c in costs])
    found = (largest.verify / largest.nodes * 1e6, slope, max(c.peak / c.nodes for c in costs) / 1e3)
    for what, value, budget in zip(
        ("us a node", "slope", "KB a node"), found, (BUDGET_MICROSECONDS, BUDGET_SLOPE, BUDGET_KB), strict=True
    ):
        lines.append(f"{what} {value:.2f}: {'within' if value <= budget else 'OVER'} the budget of {budget:g}")
    return "\n".join(lines)


def _costs(name: str, seconds: Sequence[tuple[int, float]]) -> str:
    return _line(name, [f"{s / nodes * 1e6:.2f}" for nodes, s in seconds], f"{_slope(seconds):.2f}")


def _slope(seconds: Sequence[tuple[int, float]]) -> float:
    """How time grows with nodes: 1 in proportion, 2 with the square."""
    (small, first), (large, last) = seconds[0], seconds[-1]
    if small == large or min(first, last) <= 0:
        return math.nan
    return math.log(last / first) / math.log(large / small)


def _line(name: str, cells: Sequence[str], last: str) -> str:
    return f"{name:<22}" + "".join(f"{cell:>10}" for cell in cells) + f"{last:>8}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args(arguments).repeat
    measure(SIZES[0], 1)  # what is imported and cached at first use
    print(report([measure(nodes, repeat) for nodes in SIZES]))


if __name__ == "__main__":
    main()
