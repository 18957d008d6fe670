"""Random mutants of a graph: one to three operators, one after the other, the same for the same seed."""
from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ep_fx.graph import ParallelGraph
from ep_fx.testing.mutate.base import Operator, operators


@dataclass(frozen=True)
class Mutant:
    """A broken graph.

    Args:
        graph: the edited graph.
        operators: what was done to it, in order.
        ranks: the ranks that run it while the others run the valid graph; None: all.
        seed: of the edits.
    """

    graph: ParallelGraph
    operators: tuple[str, ...]
    ranks: tuple[int, ...] | None
    seed: int


def mutant(graph: ParallelGraph, chosen: Collection[Operator], seed: int) -> Mutant | None:
    """`graph` after all of `chosen`; None where one of them does not apply."""
    rng = random.Random(seed)
    ranks: set[tuple[int, ...] | None] = {item.ranks for item in chosen}
    for item in chosen:
        edited = item(graph, rng)
        if edited is None:
            return None
        graph = edited
    return Mutant(graph, tuple(item.name for item in chosen), ranks.pop() if len(ranks) == 1 else None, seed)


def mutants(graph: ParallelGraph, count: int, seed: int, depth: int = 3) -> Iterator[Mutant]:
    """`count` mutants of `graph`, each by one to `depth` random operators; half of them by one alone."""
    rng = random.Random(seed)
    table = sorted(operators().values(), key=lambda o: o.name)
    made = 0
    while made < count:
        number = 1 if depth == 1 or rng.random() < 0.5 else rng.randint(2, depth)
        chosen = rng.sample(table, number)
        if len({item.ranks for item in chosen}) > 1:
            continue  # edits of one rank and edits of all are no one graph
        found = mutant(graph, chosen, rng.randrange(2**31))
        if found is not None:
            made += 1
            yield found
