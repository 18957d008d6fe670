"""Operators on order: waits, the place of collectives, ranks that disagree, the border between the halves."""
from __future__ import annotations

import random
from itertools import pairwise

from torch import fx

from ep_fx.graph import (
    ParallelGraph,
    Phase,
    Role,
    copy_info,
    find_regions,
    info_of,
    is_backward,
    is_collective,
    role_of,
)
from ep_fx.testing.mutate.base import choose, erase, operator, replace_argument
from ep_fx.testing.mutate.gradients import read_elements
from ep_fx.testing.mutate.memory import gathered, reshard_of

WAITS = (Role.WAIT, Role.UNSHARD_WAIT, Role.REDUCE_GRAD_WAIT)


def _waits(graph: ParallelGraph) -> list[fx.Node]:
    found = [wait for role in WAITS for wait in graph.nodes(role)]
    return [w for w in found if isinstance(w.args[0], fx.Node)]


@operator("drop-wait", "nobody waits for a collective")
def drop_wait(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, _waits(graph))
    if wait is None:
        return None
    erase(wait, wait.args[0])  # type: ignore[arg-type]
    return graph


@operator("pass-by-wait", "one reader takes the result of a collective without waiting for it")
def pass_by_wait(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, _waits(graph))
    reader = choose(rng, list(wait.users)) if wait is not None else None
    if wait is None or reader is None or reader.op == "output":
        return None
    reader.replace_input_with(wait, wait.args[0])  # type: ignore[arg-type]
    return graph


@operator("wait-twice", "a collective is waited for twice")
def wait_twice(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, _waits(graph))
    if wait is None:
        return None
    reader = choose(rng, list(wait.users))
    with graph.graph.inserting_after(wait):
        twin = graph.graph.node_copy(wait, lambda n: n)
    if reader is not None:
        reader.replace_input_with(wait, twin)
    return graph


def _swap_neighbours(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    """Moves a collective before the one that precedes it, where data allows."""
    collectives = [n for n in graph if is_collective(n)]
    places = graph.positions()
    free = []
    for first, second in pairwise(collectives):
        ready = max((places[i] for i in second.all_input_nodes), default=-1)
        if ready < places[first] and is_backward(first) is is_backward(second):
            free.append((first, second))
    pair = choose(rng, free)
    if pair is None:
        return None
    pair[0].prepend(pair[1])
    return graph


@operator("reorder-on-one-rank", "rank 0 starts two collectives in another order than the other ranks", ranks=(0,))
def reorder_on_one_rank(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    return _swap_neighbours(graph, rng)


@operator("skip-on-one-rank", "rank 0 leaves a reduction out that the other ranks wait for", ranks=(0,))
def skip_on_one_rank(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, graph.nodes(Role.REDUCE_GRAD_WAIT))
    start = wait.args[0] if wait is not None else None
    if wait is None or not isinstance(start, fx.Node) or role_of(start) is not Role.ALL_REDUCE_GRAD:
        return None
    given = start.args[0]
    if isinstance(given, fx.Node):
        erase(wait, given)
    else:
        read_elements(wait, list(given))  # type: ignore[arg-type]
        graph.graph.erase_node(wait)
    graph.graph.erase_node(start)
    return graph


@operator("extra-on-one-rank", "rank 0 gathers a unit once more than the other ranks", ranks=(0,))
def extra_on_one_rank(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, graph.nodes(Role.UNSHARD_WAIT))
    start = wait.args[0] if wait is not None else None
    if wait is None or not isinstance(start, fx.Node):
        return None
    with graph.graph.inserting_after(wait):
        again = graph.graph.node_copy(start, lambda n: n)
    with graph.graph.inserting_after(again):
        graph.graph.node_copy(wait, lambda _: again)
    return graph


@operator("gather-experts-late", "experts are gathered after their tokens have begun to travel")
def gather_experts_late(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    region = choose(rng, find_regions(graph))
    if region is None:
        return None
    unit = graph.manifest.names[_parameter(graph, region.name)].unit
    phase = rng.choice(list(Phase))
    last = region.source if phase is Phase.FORWARD else region.first(phase)
    nodes = [n for n in graph.nodes(Role.UNSHARD, phase) if info_of(n).fqn == unit]
    unshard = choose(rng, nodes)
    if unshard is None or last is None or graph.positions()[unshard] > graph.positions()[last]:
        return None
    chain = [unshard, *unshard.users, *(v for w in unshard.users for v in w.users)]
    place = last
    for node in sorted(set(chain), key=graph.positions().__getitem__):
        if node.op == "output" or role_of(node) not in (Role.UNSHARD, Role.UNSHARD_WAIT, Role.GETITEM):
            return None
        place.append(node)
        place = node
    return graph


def _parameter(graph: ParallelGraph, region: str) -> str:
    return next(r.parameters[0] for r in graph.manifest.regions if r.name == region)


@operator("free-experts-early", "experts are freed right after their last use, before their tokens are back")
def free_experts_early(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    experts = {n for r in graph.manifest.regions for n in r.parameters}
    units = {graph.manifest.names[name].unit for name in experts}
    values = [v for v in gathered(graph) if info_of(v).fqn in units]
    value = choose(rng, values)
    reshard = reshard_of(value) if value is not None else None
    if reshard is None:
        return None
    places = graph.positions()
    seen, stack = set(reshard.all_input_nodes), list(reshard.all_input_nodes)
    used: list[fx.Node] = []
    while stack:  # readers, and what may be views of them
        for user in stack.pop().users:
            if user is reshard or user.op == "output" or user in seen:
                continue
            used.append(user)
            seen.add(user)
            if len(user.all_input_nodes) == 1:
                stack.append(user)
    half = is_backward(reshard)
    before = [u for u in used if is_backward(u) is half and places[u] < places[reshard]]
    if not before:
        return None
    last = max(before, key=places.__getitem__)
    if last.next is reshard:
        return None
    last.append(reshard)
    return graph


@operator("wrong-half", "a node is labelled as belonging to the other half of the step")
def wrong_half(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [n for n in graph if n.op == "call_function"])
    if node is None:
        return None
    copy_info(node, node, phase=Phase.FORWARD if is_backward(node) else Phase.BACKWARD)
    return graph


@operator("wrong-group", "a gather or a reduction runs over another group")
def wrong_group(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    roles = (Role.UNSHARD, Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD)
    node = choose(rng, [n for role in roles for n in graph.nodes(role)])
    mesh = graph.manifest.mesh
    names = sorted({*mesh.groups.values(), *filter(None, (mesh.exchange,))})
    if node is None:
        return None
    other = choose(rng, [g for g in names if g != node.args[-1]])
    if other is None:
        return None
    replace_argument(node, len(node.args) - 1, other)
    return graph


@operator("wrong-world-size", "a gather or a reduction believes that its group has another number of ranks")
def wrong_world_size(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.UNSHARD), *graph.nodes(Role.REDUCE_GRAD)])
    if node is None:
        return None
    size = int(node.args[1])  # type: ignore[arg-type]
    replace_argument(node, 1, rng.choice((1, 2 * size)))
    return graph
