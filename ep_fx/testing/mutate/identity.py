"""Operators that change an argument and leave every name, label and neighbour as it was."""
from __future__ import annotations

import random

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.testing.mutate.base import choose, operator, replace_argument

aten = torch.ops.aten


@operator("swap-in-list", "two parameters change places in the list of a gather or a reduction")
def swap_in_list(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    nodes = [*graph.nodes(Role.UNSHARD), *graph.nodes(Role.REDUCE_GRAD), *graph.nodes(Role.ALL_REDUCE_GRAD)]
    node = choose(rng, [n for n in nodes if isinstance(n.args[0], (list, tuple)) and len(n.args[0]) > 1])
    if node is None:
        return None
    values = list(node.args[0])  # type: ignore[arg-type]
    first, second = rng.sample(range(len(values)), 2)
    values[first], values[second] = values[second], values[first]
    replace_argument(node, 0, values)
    return graph


@operator("repeat-in-list", "a parameter stands twice in the list of a gather or a reduction, another not at all")
def repeat_in_list(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    nodes = [*graph.nodes(Role.UNSHARD), *graph.nodes(Role.REDUCE_GRAD), *graph.nodes(Role.RESHARD)]
    node = choose(rng, [n for n in nodes if isinstance(n.args[0], (list, tuple)) and len(n.args[0]) > 1])
    if node is None:
        return None
    values = list(node.args[0])  # type: ignore[arg-type]
    first, second = rng.sample(range(len(values)), 2)
    values[first] = values[second]
    replace_argument(node, 0, values)
    return graph


@operator("other-region-name", "a dispatch or a combine calls itself by another region's name")
def other_region_name(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    roles = (Role.CONTEXT, Role.DISPATCH, Role.COMBINE, Role.COMBINE_BACKWARD, Role.DISPATCH_BACKWARD)
    node = choose(rng, [n for role in roles for n in graph.nodes(role)])
    if node is None:
        return None
    names = sorted({r.name for r in graph.manifest.regions} - {str(node.args[-1])})
    replace_argument(node, len(node.args) - 1, choose(rng, names) or "blocks.9.experts")
    return graph


@operator("wrong-ep-size", "a dispatch believes that its experts lie on another number of ranks")
def wrong_ep_size(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.CONTEXT), *graph.nodes(Role.DISPATCH)])
    if node is None:
        return None
    size = int(node.args[3])  # type: ignore[arg-type]
    replace_argument(node, 3, size * 2 if size == 1 else rng.choice((1, size * 2)))
    return graph


@operator("wrong-pad-size", "an uneven shard is padded to another length, or along another dimension")
def wrong_pad_size(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, graph.nodes(Role.PAD_SHARD))
    if node is None:
        return None
    replace_argument(node, 2, int(node.args[2]) + rng.choice((-1, 1)))  # type: ignore[arg-type]
    return graph


@operator("unpad-like-another", "a gradient's shard is cut to the length of another parameter's")
def unpad_like_another(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, graph.nodes(Role.UNPAD_SHARD))
    if node is None:
        return None
    ranks = {p: len(s.layout.full_shape) for p, s in graph.parameter_nodes().items()}
    like = node.args[2]
    others = [p for p in ranks if isinstance(like, fx.Node) and p is not like and ranks[p] == ranks[like]]
    other = choose(rng, others)
    if other is None:
        return None
    replace_argument(node, 2, other)
    return graph


@operator("change-dimension", "a torch operator works along another dimension")
def change_dimension(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    names = ("dim", "dim0", "dim1")
    cases = []
    for node in graph:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or role_of(node) is not Role.OTHER:
            continue
        for position, argument in enumerate(schema.arguments[: len(node.args)]):
            if argument.name in names and isinstance(node.args[position], (int, list, tuple)):
                cases.append((node, position))
    case = choose(rng, cases)
    if case is None:
        return None
    node, position = case
    value = node.args[position]
    value = [0 if v else 1 for v in value] if isinstance(value, (list, tuple)) else 0 if value else 1
    replace_argument(node, position, value)
    return graph


@operator("change-number", "a number in the arguments of a torch operator is another one")
def change_number(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    cases = [
        (node, position)
        for node in graph
        if node.op == "call_function" and role_of(node) is Role.OTHER
        for position, value in enumerate(node.args)
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))
    ]
    case = choose(rng, cases)
    if case is None:
        return None
    node, position = case
    value = node.args[position]
    replace_argument(node, position, value + 1 if isinstance(value, int) else float(value) * 1.5)  # type: ignore[arg-type]
    return graph


@operator("change-target", "a torch operator is replaced by its neighbour: add by sub, mul by div")
def change_target(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    others = {
        aten.add.Tensor: aten.sub.Tensor, aten.mul.Tensor: aten.div.Tensor, aten.sub.Tensor: aten.add.Tensor,
        aten.div.Tensor: aten.mul.Tensor, aten.silu.default: aten.relu.default, aten.exp.default: aten.neg.default,
    }
    node = choose(rng, [n for n in graph if n.target in others])
    if node is None:
        return None
    node.target = others[node.target]  # type: ignore[index]
    return graph


@operator("swap-operands", "the two operands of a product, a difference or a quotient change places")
def swap_operands(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    targets = (aten.mm.default, aten.bmm.default, aten.sub.Tensor, aten.div.Tensor)
    nodes = [n for n in graph if n.target in targets and len(n.all_input_nodes) == 2]
    node = choose(rng, nodes)
    if node is None:
        return None
    first, second, *rest = node.args
    node.args = (second, first, *rest)
    return graph
