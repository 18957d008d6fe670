"""Operators on sums over `tp`: forgotten, over other ranks, made twice, made where nothing is to be summed."""
from __future__ import annotations

import random

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.testing.mutate.base import choose, erase, operator, replace_argument

c10d = torch.ops._c10d_functional


def sums(graph: ParallelGraph) -> list[tuple[fx.Node, fx.Node]]:
    """(all-reduce over ``tp``, its wait)."""
    over_tp = [n for n in graph.nodes(Role.ALL_REDUCE) if graph.manifest.mesh.dims_of(str(n.args[2])) == ("tp",)]
    return [(n, wait) for n in over_tp for wait in n.users if role_of(wait) is Role.WAIT]


def sum_again(graph: ParallelGraph, value: fx.Node) -> None:
    """Puts a sum over ``tp`` between `value` and its readers."""
    users = list(value.users)
    fake, group = value.meta.get("val"), graph.manifest.mesh.group("tp")
    with graph.graph.inserting_after(value):
        started = graph.call(c10d.all_reduce.default, value, "sum", group, like=value, value=fake)
    with graph.graph.inserting_after(started):
        done = graph.call(c10d.wait_tensor.default, started, like=value, value=fake)
    for user in users:
        user.replace_input_with(value, done)


@operator("drop-tp-sum", "parts of an expert's output, or of its rows' gradient, are not added up over tp")
def drop_tp_sum(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    case = choose(rng, sums(graph))
    if case is None:
        return None
    start, wait = case
    erase(wait, start.all_input_nodes[0])
    graph.graph.erase_node(start)
    return graph


@operator("tp-sum-elsewhere", "parts are added up over the ranks of another mesh dimension")
def tp_sum_elsewhere(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    case = choose(rng, sums(graph))
    other = choose(rng, [name for dims, name in sorted(graph.manifest.mesh.groups.items()) if "tp" not in dims])
    if case is None or other is None:
        return None
    replace_argument(case[0], 2, other)
    return graph


@operator("tp-sum-twice", "parts are added up over tp twice")
def tp_sum_twice(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    case = choose(rng, sums(graph))
    if case is None:
        return None
    sum_again(graph, case[1])
    return graph


@operator("tp-sum-of-whole-rows", "rows that every rank along tp has are added up over tp")
def tp_sum_of_whole_rows(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    rows = choose(rng, [*graph.nodes(Role.REGROUP), *graph.nodes(Role.PERMUTE_BACKWARD)])
    if rows is None or graph.manifest.mesh.size("tp") == 1:
        return None
    sum_again(graph, rows)
    return graph


@operator("tp-max", "of the parts of an output the greatest is taken instead of their sum")
def tp_max(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    case = choose(rng, sums(graph))
    if case is None:
        return None
    replace_argument(case[0], 1, "max")
    return graph
