"""State that is read too early, written too early, drawn again or left where the next micro-batch finds it.

One run of one micro-batch shows little of it: a race, a buffer, a mask, a saved value that somebody wrote over.
"""
from __future__ import annotations

import random

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, copy_info, is_mutation, target_name
from ep_fx.testing.mutate._blind import (
    BACKWARD,
    FORWARD,
    again,
    aten,
    exchanges,
    first_argument,
    has_role,
    in_order,
    named,
    put,
    readers,
    through,
    twins,
    type_of,
)
from ep_fx.testing.mutate.base import choose, erase, operator

_RANDOM = ("aten::native_dropout", "aten::bernoulli", "aten::rand_like", "aten::randn_like", "aten::rand")
_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor, aten.div.Tensor: aten.div_.Tensor,
    aten.silu.default: aten.silu_.default, aten.neg.default: aten.neg_.default,
}


def _updates(graph: ParallelGraph) -> list[fx.Node]:
    """The nodes that update a buffer in place, in order."""
    held = {graph.placeholder(buffer.placeholder) for buffer in graph.manifest.buffers}
    found = []
    for node in graph:
        if is_mutation(node) and node.args and node.args[0] in held:
            held.add(node)
            found.append(node)
    return found


def _is_fixed(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


@operator("blind-read-before-wait", "rows are read while their exchange still runs; it is waited for afterwards")
def read_before_wait(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, [n for n in graph.nodes(Role.WAIT) if readers(n)])
    if wait is None:
        return None
    reader = in_order(graph, readers(wait))[0]
    reader.replace_input_with(wait, first_argument(wait))
    reader.append(wait)
    return graph


@operator("blind-no-wait", "gathered parameters or reduced gradients are read without a wait")
def no_wait(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    waits = [*graph.nodes(Role.UNSHARD_WAIT), *graph.nodes(Role.REDUCE_GRAD_WAIT)]
    wait = choose(rng, [n for n in waits if isinstance(n.args[0], fx.Node)])
    if wait is None:
        return None
    erase(wait, first_argument(wait))
    return graph


@operator("blind-written-in-place", "a result is written over an argument that is read again, in backward or before")
def written_in_place(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    places = graph.positions()
    nodes = [n for n in graph if n.target in _IN_PLACE and isinstance(n.args[0], fx.Node) and not n.kwargs]
    nodes = [n for n in nodes if target_name(first_argument(n)) not in ("placeholder", "get_attr", "aten::expand")]
    nodes = [n for n in nodes if type_of(n) == type_of(first_argument(n))]
    sizes = ("aten::sym_size", "aten::sym_numel")
    needed = {n: [u for u in readers(first_argument(n)) if target_name(u) not in sizes] for n in nodes}
    node = choose(rng, [n for n in nodes if any(places[user] > places[n] for user in needed[n])])
    if node is None:
        return None
    node.target = _IN_PLACE[node.target]  # type: ignore[index]
    return graph


@operator("blind-buffer-twice-or-never", "an update of a buffer runs twice, or not at all")
def buffer_twice_or_never(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, _updates(graph))
    if node is None:
        return None
    if rng.random() < 0.5:
        erase(node, first_argument(node))
        return graph
    with graph.graph.inserting_before(node.next):
        twice = graph.graph.node_copy(node)
    copy_info(twice, node)
    return graph


@operator("blind-buffer-stale", "what follows the update of a buffer reads the value from before it")
def buffer_stale(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = [(n, u) for n in _updates(graph) for u in readers(n) if not is_mutation(u)]
    if not found:
        return None
    update, reader = rng.choice(found)
    buffer = update
    while buffer.op == "call_function":
        buffer = first_argument(buffer)
    first = next(n for n in _updates(graph) if n.args[0] is buffer)
    reader.replace_input_with(update, put(graph, first, aten.clone.default, buffer, like=buffer))
    return graph


@operator("blind-drawn-again", "backward draws a dropout mask or a noise of its own")
def drawn_again(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = []
    for node in named(graph, *_RANDOM, phase=FORWARD):
        values = [node, *(u for u in node.users if has_role(u, Role.GETITEM))]
        found += [(node, value) for value in values if readers(value, BACKWARD)]
    if not found:
        return None
    node, value = rng.choice(found)
    users = in_order(graph, readers(value, BACKWARD))
    copies = again(graph, list(dict.fromkeys((node, value))), users[0])
    for user in users:
        user.replace_input_with(value, copies[value])
    return graph


@operator("blind-kept-on-module", "counts for backward are kept on the module, where the next micro-batch finds them")
def kept_on_module(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    counts = [n for n in graph.nodes(phase=FORWARD) if n.op == "call_function" and readers(n, BACKWARD)]
    fixed = [n for n in counts if (kind := type_of(n)) and kind[0] in (torch.int64, torch.int32) and _is_fixed(n)]
    node = choose(rng, fixed)
    if node is None:
        return None
    value = node.meta["val"]
    graph.constants["kept_counts"] = torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device)
    with graph.graph.inserting_before(node):
        kept = graph.graph.create_node("get_attr", "kept_counts")
    copy_info(kept, node)
    kept.meta["val"] = value
    put(graph, node.next, aten.copy_.default, kept, node, like=node)
    for user in readers(node, BACKWARD):
        user.replace_input_with(node, kept)
    return graph


@operator("blind-jitter", "noise that the model does not ask for is added to what a router chooses by")
def jitter(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, named(graph, "aten::topk", phase=FORWARD))
    if node is None:
        return None
    scores = first_argument(node)
    noise = put(graph, node, aten.rand_like.default, scores, like=scores)
    small = put(graph, node, aten.mul.Scalar, noise, 0.01, like=scores)
    through(graph, scores, [node], aten.add.Tensor, small)
    return graph


@operator("blind-rank-without-rows", "rank 0 takes zeros for gradients of rows and leaves out the exchange", ranks=(0,))
def rank_without_rows(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    forward = [n for n in graph.nodes(phase=FORWARD) if n.op == "call_function"]
    waits = [wait for node in exchanges(graph, BACKWARD) for wait in node.users if has_role(wait, Role.WAIT)]
    found = [(wait, like) for wait in waits for like in twins(forward, wait)]
    if not found:
        return None
    wait, like = rng.choice(found)
    exchange = first_argument(wait)
    wait.replace_all_uses_with(put(graph, wait, aten.zeros_like.default, like, like=like))
    graph.graph.erase_node(wait)
    graph.graph.erase_node(exchange)
    return graph
