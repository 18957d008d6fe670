"""Gradients that are wrong and look right: scaled, a term lost, computed from other saved values than forward's own.

A loss falls along many directions that are not the gradient's.
"""
from __future__ import annotations

import random

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, copy_info, target_name
from ep_fx.testing.mutate._blind import (
    BACKWARD,
    FORWARD,
    aten,
    first_argument,
    named,
    readers,
    through,
    truncated,
    twins,
    type_of,
)
from ep_fx.testing.mutate.base import choose, operator, replace_argument


def _sums(graph: ParallelGraph) -> list[fx.Node]:
    """Where backward adds two gradients of one type."""
    sums = [n for n in named(graph, "aten::add", phase=BACKWARD) if all(isinstance(a, fx.Node) for a in n.args)]
    return [n for n in sums if len(n.args) == 2 and type_of(first_argument(n)) == type_of(n.all_input_nodes[-1])]


def _saved(graph: ParallelGraph) -> list[fx.Node]:
    """Floating-point values of forward that backward reads, parameters and inputs apart."""
    nodes = [n for n in graph.nodes(phase=FORWARD) if n.op == "call_function" and readers(n, BACKWARD)]
    return [n for n in nodes if (kind := type_of(n)) and kind[0].is_floating_point]


@operator("blind-loss-scale", "the gradient of an output is divided by a number of micro-batches on the way in")
def loss_scale(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    tangents = [graph.placeholder(name) for name in graph.manifest.tangents]
    tangent = choose(rng, [node for node in tangents if readers(node)])
    if tangent is None:
        return None
    through(graph, tangent, readers(tangent), aten.div.Scalar, 2.0)
    return graph


@operator("blind-exchange-averages", "rows of gradients are averaged over ep as if the exchange had summed them")
def exchange_averages(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    ends = [*graph.nodes(Role.REGROUP, BACKWARD), *graph.nodes(Role.PAD_ROWS, BACKWARD)]
    node = choose(rng, [end for end in ends if readers(end)])
    if node is None:
        return None
    through(graph, node, readers(node), aten.div.Scalar, float(graph.manifest.mesh.size("ep")))
    return graph


@operator("blind-term-lost", "where two gradients meet, one of them is dropped")
def term_lost(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, _sums(graph))
    if node is None:
        return None
    node.replace_all_uses_with(rng.choice(node.all_input_nodes))
    return graph


@operator("blind-term-scaled", "where two gradients meet, one of them counts as often as there are data ranks")
def term_scaled(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, _sums(graph))
    if node is None:
        return None
    node.kwargs = {**node.kwargs, "alpha": graph.manifest.mesh.data_ranks}
    return graph


@operator("blind-saved-of-other-layer", "backward reads what another layer saved, not its own")
def saved_of_other_layer(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    saved = _saved(graph)
    pairs = [(a, b) for a in saved for b in twins(saved, a) if target_name(a) == target_name(b)]
    if not pairs:
        return None
    own, foreign = rng.choice(pairs)
    rng.choice(readers(own, BACKWARD)).replace_input_with(own, foreign)
    return graph


@operator("blind-output-for-input", "the backward of an activation reads its output for its input, or the reverse")
def output_for_input(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = []
    for node in (n for n in graph.nodes(phase=BACKWARD) if "_backward" in target_name(n)):
        name = target_name(node).partition("_backward")[0]
        for saved in (n for n in node.all_input_nodes[1:] if n.op == "call_function" and readers(n, FORWARD)):
            made = [u for u in readers(saved, FORWARD) if target_name(u) == name]
            found += [(node, saved, other) for other in made if type_of(other) == type_of(saved)]
            if target_name(saved) == name and saved.all_input_nodes:
                found.append((node, saved, saved.all_input_nodes[0]))
    if not found:
        return None
    node, saved, other = rng.choice(found)
    node.replace_input_with(saved, other)
    return graph


@operator("blind-forward-rows-sent", "an exchange of backward sends the rows of forward in place of their gradients")
def forward_rows_sent(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    forward = [n for n in graph.nodes(phase=FORWARD) if n.op == "call_function"]
    sends = [*graph.nodes(Role.SEND_ROWS, BACKWARD), *graph.nodes(Role.UNGROUP, BACKWARD)]
    pairs = [(node, rows) for node in sends for rows in twins(forward, first_argument(node))]
    if not pairs:
        return None
    node, rows = rng.choice(pairs)
    replace_argument(node, 0, rows)
    return graph


@operator("blind-saved-in-bf16", "a value is saved for backward in bf16")
def saved_in_bf16(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    saved = choose(rng, _saved(graph))
    if saved is None:
        return None
    narrow = first_argument(truncated(graph, saved, readers(saved, BACKWARD), torch.bfloat16))
    saved.append(narrow)
    copy_info(narrow, saved)
    return graph


@operator("blind-router-frozen", "no gradient passes a softmax or sigmoid")
def router_frozen(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, named(graph, "aten::_softmax_backward_data", "aten::sigmoid_backward", phase=BACKWARD))
    if node is None:
        return None
    through(graph, first_argument(node), [node], aten.mul.Scalar, 0.0)
    return graph


@operator("blind-embedding-padding", "token 0 counts as padding and gets no gradient, or frequent tokens get less")
def embedding_padding(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, named(graph, "aten::embedding_dense_backward"))
    if node is None:
        return None
    place, value = rng.choice([(3, 0), (4, True)])
    replace_argument(node, place, value)
    return graph
