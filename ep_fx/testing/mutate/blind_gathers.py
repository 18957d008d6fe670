"""Gathered parameters that are another's, kept too long, freed too far, or gathered by one rank out of turn.

Half of it shows in no number: peak memory, or the next step.
"""
from __future__ import annotations

import random

from torch import fx

from ep_fx.graph import ParallelGraph, Phase, Role, info_of
from ep_fx.testing.mutate._blind import (
    BACKWARD,
    FORWARD,
    aten,
    elements,
    first_argument,
    has_role,
    in_order,
    other_groups,
    part,
    put,
    readers,
    set_element,
    twins,
)
from ep_fx.testing.mutate.base import choose, erase, operator, replace_argument


def _wholes(graph: ParallelGraph, phase: Phase) -> dict[fx.Node, fx.Node]:
    """The gathered parameter of each shard's placeholder, of those that are gathered in `phase`."""
    found = {}
    for start in graph.nodes(Role.UNSHARD, phase):
        for wait in start.users:
            for index, shard in enumerate(elements(start)):
                whole = part(wait, index)
                if whole is not None and has_role(next(iter(whole.users), None), Role.ASSEMBLE):
                    whole = next(iter(whole.users))
                if whole is not None:
                    found[first_argument(shard) if has_role(shard, Role.PAD_SHARD) else shard] = whole
    return found


def _gathered_twice(graph: ParallelGraph) -> list[tuple[fx.Node, fx.Node, list[fx.Node]]]:
    """Parameters gathered in both directions: the two values, and who reads the second one."""
    forward, backward = _wholes(graph, FORWARD), _wholes(graph, BACKWARD)
    both = [(forward[shard], backward[shard]) for shard in backward if shard in forward]
    found = [(one, two, [u for u in readers(two) if not has_role(u, Role.RESHARD)]) for one, two in both]
    return [(one, two, users) for one, two, users in found if users and one is not two]


def _not_freed(graph: ParallelGraph, reshard: fx.Node, node: fx.Node) -> None:
    kept = [element for element in elements(reshard) if element is not node]
    if kept:
        replace_argument(reshard, 0, kept)
    else:
        graph.graph.erase_node(reshard)


def _move_gather(start: fx.Node, before: fx.Node) -> None:
    for shard in elements(start):
        if shard.op != "placeholder":
            before.prepend(shard)
    before.prepend(start)


@operator("blind-shard-of-other-layer", "a gather takes a shard of another layer")
def shard_of_other_layer(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    starts, places = graph.nodes(Role.UNSHARD), graph.positions()
    shards = [shard for start in starts for shard in elements(start)]
    found = [
        (start, index, other) for start in starts for index, shard in enumerate(elements(start))
        for other in twins(shards, shard) if places[other] < places[start] and other not in elements(start)
    ]
    if not found:
        return None
    set_element(*rng.choice(found))
    return graph


@operator("blind-wholes-swapped", "two parameters of one shape change places as they are unpacked after a gather")
def wholes_swapped(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    items = [i for wait in graph.nodes(Role.UNSHARD_WAIT) for i in readers(wait) if has_role(i, Role.GETITEM)]
    pairs = [(a, b) for a in items for b in twins(items, a) if a.args[0] is b.args[0]]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    one.args, other.args = other.args, one.args
    return graph


@operator("blind-gather-elsewhere", "shards are gathered over another mesh dimension of the same size")
def gather_elsewhere(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    start = choose(rng, [n for n in graph.nodes(Role.UNSHARD) if other_groups(graph, str(n.args[2]))])
    if start is None:
        return None
    replace_argument(start, 2, rng.choice(other_groups(graph, str(start.args[2]))))
    return graph


@operator("blind-kept-for-backward", "backward reads the parameter that forward gathered, which is not freed for it")
def kept_for_backward(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = choose(rng, _gathered_twice(graph))
    if found is None:
        return None
    one, two, users = found
    for user in users:
        user.replace_input_with(two, one)
    for reshard in [u for u in readers(one, FORWARD) if has_role(u, Role.RESHARD)]:
        _not_freed(graph, reshard, one)
    return graph


@operator("blind-copy-for-backward", "forward keeps a copy of a gathered parameter, and backward reads that")
def copy_for_backward(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = choose(rng, _gathered_twice(graph))
    if found is None:
        return None
    one, two, users = found
    copy = put(graph, in_order(graph, readers(one))[0], aten.clone.default, one, like=one)
    for user in users:
        user.replace_input_with(two, copy)
    return graph


@operator("blind-one-not-freed", "one parameter of a unit is never freed")
def one_not_freed(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reshard = choose(rng, graph.nodes(Role.RESHARD))
    if reshard is None:
        return None
    _not_freed(graph, reshard, rng.choice(elements(reshard)))
    return graph


@operator("blind-freed-at-the-end", "a unit is freed at the end of its direction, long after its last use")
def freed_at_the_end(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reshard = choose(rng, graph.nodes(Role.RESHARD))
    if reshard is None:
        return None
    last = [n for n in graph.nodes(phase=info_of(reshard).phase) if n.op == "call_function"][-1]
    if last is not reshard:
        last.append(reshard)
    return graph if last is not reshard else None


@operator("blind-gathered-at-once", "a unit is gathered at the start of its direction, long before its first use")
def gathered_at_once(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    start = choose(rng, graph.nodes(Role.UNSHARD))
    if start is None:
        return None
    first = next(n for n in graph.nodes(phase=info_of(start).phase) if n.op == "call_function")
    if first is start or first in elements(start):
        return None
    _move_gather(start, first)
    return graph


@operator("blind-shard-freed", "backward frees the shard of a parameter beside the gathered values")
def shard_freed(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    owners = {whole: shard for shard, whole in _wholes(graph, BACKWARD).items()}
    found = [(n, owners[e]) for n in graph.nodes(Role.RESHARD, BACKWARD) for e in elements(n) if e in owners]
    if not found:
        return None
    reshard, shard = rng.choice(found)
    replace_argument(reshard, 0, [*elements(reshard), shard])
    return graph


@operator("blind-uneven-cuts", "the sizes of uneven shards are taken in another order of ranks")
def uneven_cuts(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.ASSEMBLE), *graph.nodes(Role.DISASSEMBLE)])
    sizes = list(node.args[2]) if node is not None and isinstance(node.args[2], (list, tuple)) else []
    if node is None or len(set(sizes)) < 2:
        return None
    replace_argument(node, 2, [sizes[-1], *sizes[:-1]])
    return graph


@operator("blind-shard-not-padded", "a short shard goes into the gather as it is")
def shard_not_padded(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    pad = choose(rng, graph.nodes(Role.PAD_SHARD))
    if pad is None:
        return None
    erase(pad, first_argument(pad))
    return graph


@operator("blind-rank-gathers-early", "rank 0 gathers a layer before an earlier one of the same group", ranks=(0,))
def rank_gathers_early(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    phase = rng.choice([FORWARD, BACKWARD])
    starts = graph.nodes(Role.UNSHARD, phase)
    pairs = [(a, b) for i, b in enumerate(starts) for a in starts[:i] if a.args[2] == b.args[2]]
    if not pairs:
        return None
    earlier, later = rng.choice(pairs)
    _move_gather(later, earlier)
    return graph
