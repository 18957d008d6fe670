"""R20, reordering and bucketing break the order of nodes once exchanges are present.

Sources: pytorch/torchtitan#4047 and PR#4107, meta-pytorch/autoparallel PR#469.
A pass that relies on the order in which a trace happened to list nodes ignores a dependency through nodes outside its
bucket. So the captured graph is shuffled fifty times, every time into another valid order, before the passes run: each
must pass the rules and give the same numbers. Orders that are not valid are rejected.
"""
from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

import ep_fx
from ep_fx.graph import ParallelGraph, PassManager, Role, info_of, split
from ep_fx.graph.effects import effect_edges
from ep_fx.passes import default_pipeline
from ep_fx.targets import emit
from ep_fx.testing import RankPools, local_mesh
from ep_fx.verify import verify
from tests.capturing import captured
from tests.cases.hand import M4
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids

ORDERS = 50


def shuffled(graph: ParallelGraph, seed: int) -> ParallelGraph:
    """The same graph with its nodes in another valid order: edges, effects and the two phases are kept."""
    chance = random.Random(seed)
    nodes = list(graph)
    body = [n for n in nodes if n.op in ("call_function", "get_attr")]
    after: dict[fx.Node, list[fx.Node]] = {n: list(n.users) for n in body}
    for edge in effect_edges(graph):
        after[edge.before].append(edge.after)
    missing = Counter(later for n in body for later in after[n])
    order: list[fx.Node] = []
    for phase in dict.fromkeys(info_of(n).phase for n in body):
        ready = [n for n in body if info_of(n).phase is phase and not missing[n]]
        while ready:
            node = ready.pop(chance.randrange(len(ready)))
            order.append(node)
            missing.subtract(after[node])
            now_ready = [n for n in dict.fromkeys(after[node]) if not missing[n] and n.op != "output"]
            ready += [n for n in now_ready if info_of(n).phase is phase]
    assert len(order) == len(body)
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*(n for n in nodes if n.op == "placeholder"), *order, graph.output):
        env[node] = new.node_copy(node, env.__getitem__)
        env[node]._rename(node.name)
    return ParallelGraph(new, graph.manifest, graph.constants)


def fifty_orders(rank: int) -> tuple[int, list[str]]:
    """Number of different orders, and what was wrong in any."""
    model, ids = TinyMoE(blocks=1, shared=True, grouped=True), token_ids(rank)
    module, graph = captured(model, local_mesh(**M4), ids)
    logits = module(ids)
    next_token_loss(logits, ids).backward()
    gradients = [p.grad.to_local() for p in module.parameters()]  # type: ignore[union-attr]
    shards = [p.to_local().detach() for p in module.parameters()]  # type: ignore[attr-defined]
    seen, wrong = set(), []
    for seed in range(ORDERS):
        other = shuffled(graph, seed)
        seen.add(tuple(n.name for n in other))
        PassManager(default_pipeline(), (lambda g: verify(g).raise_if_broken()) if seed % 10 == 0 else None).run(other)
        y, found = run(other, shards, ids)
        same = torch.allclose(y, logits, atol=1e-6) and all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(found, gradients, strict=True)
        )
        wrong += [] if same else [f"order {seed}"]
    return len(seen), wrong


def run(graph: ParallelGraph, shards: list[Tensor], ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the gradients of the next-token loss, of a transformed graph."""
    halves = split(graph)
    assert halves.backward is not None
    with torch.no_grad():
        (logits,), saved = emit(halves.forward, graph.constants)([*shards, ids])
    leaf = logits.requires_grad_()
    (tangent,) = torch.autograd.grad(next_token_loss(leaf, ids), leaf)
    by_name = dict(zip((p.placeholder for p in graph.manifest.parameters), shards, strict=True))
    by_name |= {graph.manifest.inputs[0]: ids, graph.manifest.tangents[0]: tangent}
    with torch.no_grad():
        found, _ = emit(halves.backward, graph.constants)([*saved, *(by_name[n] for n in halves.placeholders)])
    return logits.detach(), list(found)


def broken_orders(rank: int) -> dict[str, str]:
    """What the rules say about graphs that were spoiled by hand."""
    module = ep_fx.transform(TinyMoE(blocks=1, grouped=True), local_mesh(**M4), example_inputs=(token_ids(rank),))
    return {name: _verdict(spoil, module.graph.copy()) for name, spoil in SPOILED.items()}


def _verdict(spoil: Any, graph: ParallelGraph) -> str:
    spoil(graph)
    try:
        verify(graph).raise_if_broken()
    except Exception as error:
        return str(error)
    return "accepted"


def reshard_before_use(graph: ParallelGraph) -> None:
    """Frees the experts' weights before the first product reads them."""
    product = graph.nodes(Role.GROUPED_MM)[0]
    weights = set(product.all_input_nodes) | {b for a in product.all_input_nodes for b in a.all_input_nodes}
    reshard = next(n for n in graph.nodes(Role.RESHARD) if set(n.all_input_nodes) & weights)
    product.prepend(reshard)


def combine_before_dispatch(graph: ParallelGraph) -> None:
    """Sends the rows back before they came."""
    graph.nodes(Role.REGROUP)[0].prepend(graph.nodes(Role.UNGROUP)[0])


def no_reshard(graph: ParallelGraph) -> None:
    """Leaves the experts' weights gathered."""
    graph.graph.erase_node(graph.nodes(Role.RESHARD)[-1])


SPOILED = {f.__name__: f for f in (reshard_before_use, combine_before_dispatch, no_reshard)}


def test_r20_fifty_valid_orders_give_the_same_numbers(ranks: RankPools) -> None:
    for different, wrong in ranks(4).run(fifty_orders):
        assert different == ORDERS
        assert wrong == []


def test_r20_orders_that_are_not_valid_are_rejected(ranks: RankPools) -> None:
    for verdicts in ranks(4).run(broken_orders):
        assert "rule live" in verdicts["reshard_before_use"]
        assert "rule order" in verdicts["combine_before_dispatch"]
        assert "rule once" in verdicts["no_reshard"]
