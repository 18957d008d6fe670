"""Cut the joint graph into a forward and a backward graph.

    joint      p, x, t -> (y), (g)
    forward    p, x -> (y), (saved...)
    backward   saved..., the placeholders it reads -> (g)

What backward reads from forward is an explicit output, so any number of micro-batches can be in flight. A buffer that
forward updates in place is saved as a copy, since the next micro-batch would change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ep_fx.graph.aliases import alias_root
from ep_fx.graph.info import is_backward
from ep_fx.graph.parallel_graph import ParallelGraph


@dataclass
class Halves:
    """The two graphs.

    Args:
        forward: inputs are all placeholders but the tangents, in order; output ``((outputs...), (saved...))``.
        backward: None for a forward-only graph; inputs are the saved values, then `placeholders`;
            output ``((parameter gradients...), (input gradients...))``.
        saved: names of the saved nodes, in order.
        placeholders: names of the placeholders, tangents included, that backward reads.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    saved: list[str]
    placeholders: list[str]


def saved_values(graph: ParallelGraph) -> list[fx.Node]:
    """The values that forward keeps for backward, in order of their first use there; no placeholders among them, but
    buffers that forward updates, of which a copy is kept."""
    nodes = list(graph)
    return _kept(graph, nodes, _later(nodes))[0] if graph.manifest.tangents else []


def _later(nodes: list[fx.Node]) -> set[fx.Node]:
    return {n for n in nodes if n.op == "call_function" and is_backward(n)}


def _kept(
    graph: ParallelGraph, nodes: list[fx.Node], later: set[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], set[fx.Node]]:
    """What is saved, the placeholders that backward reads itself, and what is saved as a copy."""
    crossing = _crossing(graph, nodes, later)
    copied = _in_mutated_buffers(graph, crossing)
    saved = {n: None for n in crossing if n.op != "placeholder" or n in copied}
    return list(saved), [n for n in crossing if n not in saved], copied


def split(graph: ParallelGraph) -> Halves:
    """Cuts `graph` at its phase boundary; `graph` itself stays as it is."""
    nodes = list(graph)
    later = _later(nodes)
    saved, direct, copied = _kept(graph, nodes, later)
    forward = _forward(graph, nodes, later, saved, copied)
    if not graph.manifest.tangents:
        return Halves(forward, None, [], [])
    backward = _backward(graph, nodes, later, saved, direct)  # a node's name is in small letters, its target as given
    return Halves(forward, backward, [n.name for n in saved], [str(n.target) for n in direct])


def _in_mutated_buffers(graph: ParallelGraph, values: list[fx.Node]) -> set[fx.Node]:
    """Those of `values` that share memory with a buffer that forward updates: the next forward would change them."""
    mutated = {b.placeholder for b in graph.manifest.buffers if b.mutated}
    return {n for n in values if mutated and any(root.target in mutated for root in alias_root(n))}


def _crossing(graph: ParallelGraph, nodes: list[fx.Node], later: set[fx.Node]) -> list[fx.Node]:
    """Forward values that backward reads or returns as gradients, in order of first use; no constants among them."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node in later:
            found.update((a, None) for a in node.all_input_nodes if a not in later and a.op != "get_attr")
    for value in (*graph.gradients.values(), *graph.input_gradients):
        if isinstance(value, fx.Node) and value not in later:
            found[value] = None
    return list(found)


def _forward(
    graph: ParallelGraph, nodes: list[fx.Node], later: set[fx.Node], saved: list[fx.Node], copied: set[fx.Node]
) -> fx.Graph:
    half, env = fx.Graph(), dict[fx.Node, fx.Node]()
    tangents = set(graph.manifest.tangents)
    for node in nodes:
        if node.op != "output" and node not in later and node.target not in tangents:
            env[node] = half.node_copy(node, env.__getitem__)
    kept = [half.call_function(torch.ops.aten.clone.default, (env[n],)) if n in copied else env[n] for n in saved]
    outputs = fx.node.map_arg(graph.outputs, env.__getitem__)
    half.output((outputs, tuple(kept)))
    return half


def _backward(
    graph: ParallelGraph, nodes: list[fx.Node], later: set[fx.Node], saved: list[fx.Node], direct: list[fx.Node]
) -> fx.Graph:
    half, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*saved, *direct):
        env[node] = half.placeholder(node.name)
    for node in nodes:
        if node in later or (node.op == "get_attr" and any(user in later for user in node.users)):
            env[node] = half.node_copy(node, env.__getitem__)
    gradients = fx.node.map_arg((tuple(graph.gradients.values()), graph.input_gradients), env.__getitem__)
    half.output(gradients)
    return half
