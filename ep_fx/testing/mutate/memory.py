"""Operators on gathered weights: when they exist, who reads them, how long they stay."""
from __future__ import annotations

import operator as python
import random

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, aliases_of, info_of, is_backward, role_of
from ep_fx.testing.mutate.base import choose, operator, replace_argument

aten, ops = torch.ops.aten, torch.ops.ep_fx


def gathered(graph: ParallelGraph) -> list[fx.Node]:
    """The nodes that hold a whole parameter: what some reshard frees."""
    return [value for reshard in graph.nodes(Role.RESHARD) for value in reshard.all_input_nodes]


def reshard_of(value: fx.Node) -> fx.Node | None:
    """What frees `value`."""
    return next((user for user in value.users if role_of(user) is Role.RESHARD), None)


def readers(value: fx.Node) -> list[fx.Node]:
    """Who reads `value`, through any alias."""
    users = {user: None for alias in aliases_of(value) for user in alias.users}
    return [u for u in users if role_of(u) is not Role.RESHARD and u.op != "output"]


@operator("drop-reshard", "a gathered unit is never freed")
def drop_reshard(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reshard = choose(rng, graph.nodes(Role.RESHARD))
    if reshard is None:
        return None
    graph.graph.erase_node(reshard)
    return graph


@operator("free-one-less", "one parameter of a unit is left out when the unit is freed")
def free_one_less(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reshard = choose(rng, [r for r in graph.nodes(Role.RESHARD) if len(r.all_input_nodes) > 1])
    if reshard is None:
        return None
    values = list(reshard.all_input_nodes)
    values.pop(rng.randrange(len(values)))
    replace_argument(reshard, 0, values)
    return graph


@operator("free-twice", "a unit is freed a second time")
def free_twice(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reshard = choose(rng, graph.nodes(Role.RESHARD))
    if reshard is None:
        return None
    with graph.graph.inserting_after(reshard):
        graph.graph.node_copy(reshard, lambda n: n)
    return graph


@operator("reshard-early", "a unit is freed while some of its readers are still to come")
def reshard_early(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    value = choose(rng, gathered(graph))
    reshard = reshard_of(value) if value is not None else None
    if value is None or reshard is None:
        return None
    used = [r for r in readers(value) if is_backward(r) is is_backward(reshard)]
    reader = choose(rng, used)
    if reader is None:
        return None
    reader.prepend(reshard)
    return graph


@operator("use-after-reshard", "a reader of a gathered weight runs a second time, after the weight is freed")
def use_after_reshard(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    places = graph.positions()
    cases = []
    for value in gathered(graph):
        reshard = reshard_of(value)
        for reader in value.users:
            later = [u for u in reader.users if reshard and u.op != "output" and places[u] > places[reshard]]
            if reshard is not None and later and places[reader] < places[reshard]:
                cases.append((reshard, reader, later))
    case = choose(rng, cases)
    if case is None:
        return None
    reshard, reader, later = case
    with graph.graph.inserting_after(reshard):
        twin = graph.graph.node_copy(reader, lambda n: n)
    for user in later:
        user.replace_input_with(reader, twin)
    return graph


@operator("alias-outlives", "a view of a gathered weight is read after the weight is freed")
def alias_outlives(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    value = choose(rng, gathered(graph))
    reshard = reshard_of(value) if value is not None else None
    if value is None or reshard is None:
        return None
    with graph.graph.inserting_before(reshard):
        view = graph.call(aten.alias.default, value, like=reshard, value=value.meta.get("val"))
    with graph.graph.inserting_after(reshard):
        total = graph.call(aten.sum.default, view, like=reshard)
    name = choose(rng, sorted(graph.gradients)) if is_backward(reshard) else None
    places = graph.positions()
    target = graph.gradients[name] if name else None
    if not isinstance(target, fx.Node):
        outputs = [n for n in graph.outputs if isinstance(n, fx.Node)]
        target = choose(rng, outputs)
    if target is None or places[target] < places[reshard]:
        return None
    with graph.graph.inserting_after(target):
        nothing = graph.call(aten.mul.Tensor, total, 0.0, like=target)
    with graph.graph.inserting_after(nothing):
        mixed = graph.call(aten.add.Tensor, target, nothing, like=target, value=target.meta.get("val"))
    graph.output.replace_input_with(target, mixed)
    return graph


@operator("save-gathered", "backward reads the weight that forward gathered, which stays alive in between")
def save_gathered(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    values = gathered(graph)
    pairs = [
        (first, second)
        for first in values
        for second in values
        if not is_backward(first) and is_backward(second) and same_parameter(first, second)
    ]
    pair = choose(rng, pairs)
    if pair is None:
        return None
    first, second = pair
    forward, backward = reshard_of(first), reshard_of(second)
    assert forward is not None
    assert backward is not None
    replace_argument(forward, 0, [v for v in forward.all_input_nodes if v is not first])
    for user in list(second.users):
        if user is not backward:
            user.replace_input_with(second, first)
    replace_argument(backward, 0, [*backward.all_input_nodes, first])
    return graph


def same_parameter(a: fx.Node, b: fx.Node) -> bool:
    """Whether two gathered values come from the same placeholder."""
    return (found := parameter_of(a)) is not None and found is parameter_of(b)


def parameter_of(value: fx.Node) -> fx.Node | None:
    """The placeholder whose shards were gathered to `value`."""
    while role_of(value) is Role.ASSEMBLE and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    if role_of(value) is not Role.GETITEM:
        return None
    wait, index = value.args
    unshard = wait.args[0] if isinstance(wait, fx.Node) else None
    if not isinstance(unshard, fx.Node) or role_of(unshard) is not Role.UNSHARD or not isinstance(index, int):
        return None
    shard = unshard.args[0][index]  # type: ignore[index]
    while isinstance(shard, fx.Node) and role_of(shard) is Role.PAD_SHARD:
        shard = shard.args[0]
    return shard if isinstance(shard, fx.Node) else None


@operator("gather-twice", "a unit is gathered a second time, for one of its readers, and freed again")
def gather_twice(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    value = choose(rng, [v for v in gathered(graph) if role_of(v) is Role.GETITEM and readers(v)])
    if value is None:
        return None
    wait = value.args[0]
    reader = choose(rng, [u for u in value.users if role_of(u) is not Role.RESHARD])
    if not isinstance(wait, fx.Node) or not isinstance(wait.args[0], fx.Node) or reader is None:
        return None
    with graph.graph.inserting_before(reader):
        started = graph.graph.node_copy(wait.args[0], lambda n: n)
        done = graph.graph.node_copy(wait, lambda _: started)
        every = [graph.call(python.getitem, done, i, like=reader) for i in range(len(wait.args[0].args[0]))]  # type: ignore[arg-type]
    reader.replace_input_with(value, every[value.args[1]])  # type: ignore[index]
    last = max(readers(every[value.args[1]]), key=graph.positions().__getitem__)  # type: ignore[index]
    with graph.graph.inserting_after(last):
        graph.call(ops.reshard.default, every, like=last)
    return graph


@operator("hoist-gather", "a unit is gathered long before it is needed")
def hoist_gather(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    unshard = choose(rng, graph.nodes(Role.UNSHARD))
    if unshard is None:
        return None
    _hoist(graph, unshard)
    return graph


@operator("hoist-all-gathers", "every unit of forward is gathered before the first of them is needed")
def hoist_all_gathers(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = [u for u in graph.nodes(Role.UNSHARD) if not is_backward(u)]
    for unshard in found:
        _hoist(graph, unshard)
    return graph if len(found) > 1 else None


def _hoist(graph: ParallelGraph, unshard: fx.Node) -> None:
    """Moves a gather, its padding and its wait to the first place in its half."""
    half = is_backward(unshard)
    first = next(n for n in graph if n.op == "call_function" and is_backward(n) is half)
    chain = [*(s for s in unshard.all_input_nodes if role_of(s) is Role.PAD_SHARD), unshard]
    chain += [u for u in unshard.users if role_of(u) is Role.UNSHARD_WAIT]
    for node in chain:
        if node is not first:
            first.prepend(node)


@operator("free-late", "a unit is freed at the end of the half only")
def free_late(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reshard = choose(rng, graph.nodes(Role.RESHARD))
    if reshard is None:
        return None
    half = info_of(reshard).phase
    last = [n for n in graph if n.op == "call_function" and info_of(n).phase is half][-1]
    if last is reshard:
        return None
    last.append(reshard)
    return graph


@operator("read-the-shard", "a reader takes this rank's shard for the whole parameter")
def read_the_shard(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    value = choose(rng, [v for v in gathered(graph) if parameter_of(v) is not None and readers(v)])
    if value is None:
        return None
    reader = choose(rng, [u for u in value.users if role_of(u) is not Role.RESHARD])
    shard = parameter_of(value)
    if reader is None or shard is None:
        return None
    reader.replace_input_with(value, shard)
    return graph


@operator("assemble-wrongly", "the blocks of an uneven parameter are put together along another dimension or order")
def assemble_wrongly(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.ASSEMBLE), *graph.nodes(Role.DISASSEMBLE)])
    if node is None:
        return None
    sizes = list(node.args[2])  # type: ignore[arg-type]
    other = sizes[::-1]
    if other == sizes or rng.random() < 0.5:
        replace_argument(node, 1, 1 - int(node.args[1]))  # type: ignore[arg-type]
    else:
        replace_argument(node, 2, other)
    return graph
