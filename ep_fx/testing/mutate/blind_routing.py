"""Tokens that go to the wrong expert, come back to the wrong token or are weighed wrongly.

It all runs and trains: shapes fit, every rank does the same, and the loss falls more slowly than it could.
"""
from __future__ import annotations

import random

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, target_name
from ep_fx.testing.mutate._blind import (
    BACKWARD,
    FORWARD,
    again,
    aten,
    become,
    first_argument,
    has_role,
    in_order,
    lowered_regions,
    named,
    part,
    put,
    readers,
    through,
    truncated,
    type_of,
)
from ep_fx.testing.mutate.base import choose, operator, replace_argument

_SORTS = ("aten::sort", "aten::argsort")


def _choices(graph: ParallelGraph) -> list[fx.Node]:
    """The top-k nodes that choose more than one expert."""
    return [node for node in named(graph, "aten::topk", phase=FORWARD) if node.args[1] != 1 and part(node, 1)]


def _weights(graph: ParallelGraph) -> list[fx.Node]:
    """The routing weights of each top-k, normalised where they are."""
    found = []
    for node in _choices(graph):
        if values := part(node, 0):
            shares = [u for u in readers(values, FORWARD) if target_name(u) == "aten::div" and u.args[0] is values]
            found.append(shares[0] if shares else values)
    return [node for node in found if readers(node, FORWARD)]


def _is_order(node: fx.Node) -> bool:
    """Whether `node` is the order that a sort found: each place once."""
    return has_role(node, Role.GETITEM) and target_name(first_argument(node)) in _SORTS and node.args[1:] == (1,)


def _local_counts(graph: ParallelGraph) -> list[fx.Node]:
    """Rows of each local expert, where there is more than one of these."""
    counts = [part(region.source, 4) for region in lowered_regions(graph)]
    return [node for node in counts if node is not None and node.meta["val"].shape[0] > 1 and readers(node)]


@operator("blind-counts-rolled", "one product of the experts gives each expert the number of rows of its neighbour")
def counts_rolled(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    counts = choose(rng, _local_counts(graph))
    if counts is None:
        return None
    through(graph, counts, [rng.choice(readers(counts))], aten.roll.default, [1])
    return graph


@operator("blind-boundary", "the first or last row of an expert is taken for one of its neighbour's")
def boundary(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    searches = [n for n in named(graph, "aten::searchsorted") if n.kwargs.get("right")]
    products = [(c, u) for c in _local_counts(graph) for u in readers(c) if has_role(u, Role.GROUPED_MM)]
    if search := choose(rng, searches):
        search.kwargs = {**search.kwargs, "right": False}
    elif product := choose(rng, products):
        fewer = through(graph, product[0], [product[1]], aten.sub.Tensor, 1)
        through(graph, fewer, [product[1]], aten.clamp_min.default, 0)
    else:
        return None
    return graph


@operator("blind-choices-flipped", "first and last choice of a token change places, their weights do not")
def choices_flipped(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    phase = rng.choice([FORWARD, BACKWARD])
    ids = [i for node in _choices(graph) if (i := part(node, 1)) and readers(i, phase)]
    if not ids:
        return None
    chosen = rng.choice(ids)
    through(graph, chosen, readers(chosen, phase), aten.flip.default, [-1])
    return graph


@operator("blind-routing-again", "backward routes anew from rounded probabilities")
def routing_again(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = [(node, ids) for node in _choices(graph) if (ids := part(node, 1)) and readers(ids, BACKWARD)]
    if not found:
        return None
    node, ids = rng.choice(found)
    users = in_order(graph, readers(ids, BACKWARD))
    copies = again(graph, [node, ids], users[0])
    truncated(graph, first_argument(node), [copies[node]], torch.bfloat16)
    for user in users:
        user.replace_input_with(ids, copies[ids])
    return graph


@operator("blind-weights-raw", "routing weights are used before they are normalised")
def weights_raw(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [weights for weights in _weights(graph) if target_name(weights) == "aten::div"])
    if node is None:
        return None
    for user in readers(node, FORWARD):
        user.replace_input_with(node, first_argument(node))
    return graph


@operator("blind-weights-rounded", "routing weights or the router's logits are rounded to bf16 on their way")
def weights_rounded(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    scores = [first_argument(node) for node in _choices(graph)]
    logits = [(first_argument(s), [s]) for s in scores if target_name(s) in ("aten::_softmax", "aten::sigmoid")]
    found = choose(rng, [*((w, readers(w, FORWARD)) for w in _weights(graph)), *logits])
    if found is None:
        return None
    truncated(graph, *found, torch.bfloat16)
    return graph


@operator("blind-last-choice-lost", "the last choice of every token has weight zero")
def last_choice_lost(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    weights = choose(rng, [node for node in _weights(graph) if node.meta["val"].dim() == 2])
    if weights is None:
        return None
    value = weights.meta["val"]
    with value.fake_mode:
        fewer = value[:, :-1]
    users = readers(weights, FORWARD)
    kept = through(graph, weights, users, aten.slice.Tensor, 1, 0, -1, value=fewer)
    through(graph, kept, users, aten.constant_pad_nd.default, [0, 1], value=value)
    return graph


@operator("blind-scatter-overwrites", "of several rows that belong to one place the last one stays, not their sum")
def scatter_overwrites(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    puts = [n for n in named(graph, "aten::index_put", "aten::index_put_") if len(n.args) > 3 and n.args[3]]
    node = choose(rng, [n for n in puts if not any(_is_order(i) for i in n.all_input_nodes)])
    if node is None:
        return None
    replace_argument(node, 3, False)
    return graph


@operator("blind-order-not-inverted", "rows are put back by the order in which they were sent, not by its inverse")
def order_not_inverted(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    orders = [i for node in named(graph, *_SORTS) if (i := part(node, 1)) and _is_order(i)]
    inverse = choose(rng, [i for i in orders if first_argument(first_argument(i)) in orders])
    if inverse is None:
        return None
    users = readers(inverse, rng.choice([FORWARD, BACKWARD, None]))
    for user in users:
        user.replace_input_with(inverse, first_argument(first_argument(inverse)))
    return graph if users else None


@operator("blind-not-reordered", "rows or weights that should be put in another order are taken as they lie")
def not_reordered(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reads = [n for n in named(graph, "aten::index") if type_of(n) == type_of(first_argument(n))]
    node = choose(rng, [n for n in reads if any(_is_order(i) for i in n.all_input_nodes)])
    if node is None:
        return None
    become(node, aten.clone.default, node.args[0])
    return graph


@operator("blind-block-skipped", "one reader of a residual sum reads it as it was before the last block was added")
def block_skipped(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    sums = [n for n in named(graph, "aten::add", phase=FORWARD) if len(readers(n)) > 1 and len(n.all_input_nodes) == 2]
    node = choose(rng, [n for n in sums if type_of(n) == type_of(first_argument(n)) == type_of(n.all_input_nodes[1])])
    if node is None:
        return None
    rng.choice(readers(node)).replace_input_with(node, first_argument(node))
    return graph


@operator("blind-sequence-first", "rows become a batch of sequences as if the sequence dimension came first")
def sequence_first(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    views = [n for n in named(graph, "aten::view") if (kind := type_of(n)) and len(kind[1]) == 3]
    views = [n for n in views if (kind := type_of(first_argument(n))) and len(kind[1]) == 2]
    node = choose(rng, [n for n in views if isinstance(n.args[1], (list, tuple)) and n.args[1][0] != n.args[1][1]])
    if node is None or not isinstance(node.args[1], (list, tuple)):
        return None
    value, (batch, length, width) = node.meta["val"], node.args[1]
    with value.fake_mode:
        turned = value.transpose(0, 1).contiguous()
    wrong = put(graph, node, aten.view.default, node.args[0], [length, batch, width], like=node, value=turned)
    back = put(graph, node, aten.transpose.int, wrong, 0, 1, like=node)
    become(node, aten.clone.default, back)
    node.kwargs = {"memory_format": torch.contiguous_format}
    return graph


@operator("blind-choice-major", "rows are read as if all first choices came first, then all second choices")
def choice_major(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    reads = [
        (n, first_argument(u)) for n in named(graph, "aten::floor_divide") for u in n.users
        if target_name(u) == "aten::index" and isinstance(n.args[1], int)
    ]
    if not reads:
        return None
    node, tokens = rng.choice(reads)
    size = put(graph, node, aten.sym_size.int, tokens, 0, like=node, value=tokens.meta["val"].shape[0])
    become(node, aten.remainder.Scalar, node.args[0], size)
    return graph


@operator("blind-experts-descending", "rows are sorted from the last expert to the first")
def experts_descending(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    sort = choose(rng, [n for n in named(graph, *_SORTS) if n.kwargs.get("stable") and len(n.args) == 1])
    if sort is None:
        return None
    sort.kwargs = {**sort.kwargs, "descending": True}
    return graph
