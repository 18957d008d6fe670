"""Random mutants of a graph: one to three operators, one after the other, the same for the same seed."""
from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
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
    return (found for _, found in mutants_of({"": graph}, count, seed, depth))


def mutants_of(
    graphs: Mapping[str, ParallelGraph], count: int, seed: int, depth: int = 3
) -> Iterator[tuple[str, Mutant]]:
    """`count` mutants of random ones of `graphs`, with the name of the graph.

    The first operator of each is the next one of a shuffled list of all, so that those which few graphs give something
    to break have their turn too.
    """
    rng = random.Random(seed)
    table = sorted(operators().values(), key=lambda o: o.name)
    turn: list[Operator] = []
    made = 0
    while made < count:
        turn = turn or rng.sample(table, len(table))
        number = 1 if depth == 1 or rng.random() < 0.5 else rng.randint(2, depth)
        first = turn.pop()
        alike = [item for item in table if item.ranks == first.ranks and item is not first]
        for name in rng.sample(sorted(graphs), len(graphs)):
            chosen = [first, *rng.sample(alike, min(number - 1, len(alike)))]
            found = mutant(graphs[name], chosen, rng.randrange(2**31))
            if found is not None:
                made += 1
                yield name, found
                break
