"""Aliases: the exception table is right at run time, entry by entry, and nothing else of common use belongs in it."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # defines _c10d_functional
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import ep_fx.ops  # noqa: F401  defines the dialect
from ep_fx.graph.aliases import UNDECLARED, Aliases, alias_root, alias_sources, aliases_of

aten, ops = torch.ops.aten, torch.ops.ep_fx

UNDECLARED_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "_c10d_functional::wait_tensor": torch.ops._c10d_functional.wait_tensor.default,
    "aten::_unsafe_view": lambda x: aten._unsafe_view.default(x, [16]),
    "aten::alpha_dropout": lambda x: aten.alpha_dropout.default(x, 0.5, False),
    "aten::dropout": lambda x: aten.dropout.default(x, 0.5, False),
    "aten::feature_alpha_dropout": lambda x: aten.feature_alpha_dropout.default(x, 0.5, False),
    "aten::feature_dropout": lambda x: aten.feature_dropout.default(x, 0.5, False),
    "aten::lift": aten.lift.default,
    "aten::type_as": lambda x: aten.type_as.default(x, x),
    "aten::unsafe_chunk": lambda x: aten.unsafe_chunk.default(x, 2),
    "aten::unsafe_split": lambda x: aten.unsafe_split.Tensor(x, 2),
    "aten::unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes.default(x, [1, 3]),
    "prims::device_put": lambda x: torch.ops.prims.device_put.default(x, x.device),
}

DECLARED_CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.t.default, ()), (aten.view.default, ([16],)), (aten.reshape.default, ([16],)), (aten.alias.default, ()),
    (aten.detach.default, ()), (aten.expand.default, ([2, 4, 4],)),
    (aten.expand_as.default, (torch.empty(2, 4, 4),)),
    (aten.contiguous.default, ()), (aten._reshape_alias.default, ([16], [1])), (aten.lift_fresh.default, ()),
    (aten.to.dtype, (torch.float32,)), (aten.slice.Tensor, (0, 1, 3)), (aten.select.int, (0, 1)),
    (aten.split.Tensor, (2,)), (aten.chunk.default, (2,)), (aten.unbind.int, ()),
    (aten.split_with_sizes.default, ([1, 3],)), (aten.transpose.int, (0, 1)),
    (aten.permute.default, ([1, 0],)), (aten.unsqueeze.default, (0,)),
    (aten.diagonal.default, ()), (aten.as_strided.default, ([2], [1])), (aten.real.default, ()),
    (aten.positive.default, ()), (aten.narrow.default, (0, 0, 2)), (aten.relu_.default, ()), (aten.add_.Scalar, (1,)),
    (ops.pad_shard.default, (0, 4)), (ops.unpad_shard.default, (0, torch.empty(4, 4))),
    (ops.send_rows.default, ([1, 3],)), (ops.pad_rows.default, ([4],)),
]

FRESH_CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.clone.default, ()), (aten._to_copy.default, ()), (aten.mm.default, (torch.empty(4, 4),)),
    (aten.add.Tensor, (0,)), (aten.mul.Tensor, (1,)), (aten.div.Tensor, (1,)), (aten.neg.default, ()),
    (aten.relu.default, ()), (aten.silu.default, ()), (aten.gelu.default, ()), (aten.sigmoid.default, ()),
    (aten._softmax.default, (-1, False)), (aten.sum.dim_IntList, ([],)), (aten.mean.dim, ([0],)),
    (aten.index_select.default, (0, torch.arange(4))), (aten.index.Tensor, ([torch.arange(4)],)),
    (aten.lerp.Scalar, (torch.ones(4, 4), 0.0)), (aten.masked_fill.Scalar, (torch.ones(4, 4) > 2, 0)),
    (aten.topk.default, (4,)), (aten.sort.default, ()), (aten.cumsum.default, (0,)), (aten.clamp.default, (-9, 9)),
    (aten.constant_pad_nd.default, ([0, 0],)), (aten.roll.default, ([0],)), (aten.flip.default, ([],)),
    (aten.repeat.default, ([1, 1],)), (aten.native_dropout.default, (0.5, False)),
    (aten.bmm.default, (torch.empty(4, 4, 4),)),
    (aten.native_layer_norm.default, ([4], None, None, 1e-5)), (aten.slice_scatter.default, (torch.empty(4, 4),)),
    (aten.threshold_backward.default, (torch.ones(4, 4), 0)), (aten.zeros_like.default, ()),
    (aten.gather.default, (0, torch.zeros(4, 4, dtype=torch.int64))), (aten.tril.default, ()),
    (torch.ops.prims.convert_element_type.default, (torch.float32,)), (ops.assemble.default, (0, [2, 2])),
    (ops.disassemble.default, (0, [4])), (ops.regroup.default, (torch.arange(4),)),
    (ops.ungroup.default, (torch.arange(4),)), (ops.dispatch.default, (torch.tensor([4]), None, 1, "r")),
    (ops.combine.default, (torch.arange(4), torch.tensor([[4], [4]]), 4, "r")),
]

COMPOSITES: dict[str, Callable[[Tensor], Any]] = {
    "einsum": lambda x: torch.einsum("ij->ji", x), "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1]),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"), "atleast_3d": torch.atleast_3d,
    "sum_to_size": lambda x: x.sum_to_size(4, 4), "conj_physical": torch.conj_physical, "matmul": lambda x: x @ x,
    "type_as": lambda x: x.type_as(x), "dropout": lambda x: torch.dropout(x, 0.5, False), "to": lambda x: x.to(x.dtype),
    "chunk": lambda x: torch.chunk(x, 2), "tensor_split": lambda x: torch.tensor_split(x, 2),
}


def storages(value: Any) -> set[int]:
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return {t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor) and t.numel()}


def first_tensor(target: Any) -> Tensor:
    return torch.rand(4, 4, 4) if target is aten.bmm.default else torch.rand(4, 4)


def call_in_graph(target: Any, *arguments: Any) -> tuple[fx.Node, fx.Node]:
    """A node `target(x, *arguments)` and x, tensors among the arguments being placeholders of their own."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = [graph.placeholder("y") if isinstance(a, Tensor) else a for a in arguments]
    return graph.call_function(target, (x, *given)), x


# -- at run time ---------------------------------------------------------------------------------------------------
def test_every_entry_of_the_table_is_tried() -> None:
    assert set(UNDECLARED_CALLS) == UNDECLARED


@pytest.mark.parametrize("name", sorted(UNDECLARED))
def test_entry_shares_memory_though_its_schema_does_not_say(name: str) -> None:
    namespace, op = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), op)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if "out" not in overload]
    assert all(result.alias_info is None for schema in schemas for result in schema.returns)
    x = torch.rand(4, 4)
    assert storages(UNDECLARED_CALLS[name](x)) == storages(x)


@pytest.mark.parametrize(("target", "arguments"), DECLARED_CALLS, ids=[str(t) for t, _ in DECLARED_CALLS])
def test_declared_alias_shares_and_is_seen(target: Any, arguments: tuple[Any, ...]) -> None:
    x = first_tensor(target)
    assert storages(target(x, *arguments)) == storages(x)
    node, source = call_in_graph(target, *arguments)
    assert alias_sources(node) == [source]


@pytest.mark.parametrize(("target", "arguments"), FRESH_CALLS, ids=[str(t) for t, _ in FRESH_CALLS])
def test_other_operators_share_nothing(target: Any, arguments: tuple[Any, ...]) -> None:
    x = first_tensor(target)
    assert not storages(target(x, *arguments)) & storages(x)
    node, _ = call_in_graph(target, *arguments)
    assert alias_sources(node) == []


@pytest.mark.parametrize("name", COMPOSITES)
def test_what_a_trace_makes_of_a_composite_is_seen_or_shares_nothing(name: str) -> None:
    """Composites that may return their argument are no entries: a trace consists of what they are made of."""
    fn, x = COMPOSITES[name], torch.rand(4, 4)
    graph = make_fx(fn)(x).graph
    nodes = list(graph.nodes)
    placeholder, output = nodes[0], nodes[-1]
    seen = Aliases(nodes)
    results = [n for n in torch.utils._pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]
    shares = bool(storages(fn(x)) & storages(x))
    assert any((placeholder, None) in seen.memory(n) for n in results) is shares


# -- in graphs -----------------------------------------------------------------------------------------------------
def test_waited_lists_share_element_by_element() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    gathered = graph.call_function(ops.unshard.default, ([a, b], 2, "g"))
    done = graph.call_function(ops.unshard_wait.default, (gathered,))
    first, second = (graph.call_function(operator.getitem, (done, i)) for i in range(2))
    view = graph.call_function(aten.t.default, (second,))
    aliases = Aliases(graph.nodes)
    assert aliases.memory(first) == ((gathered, 0),)
    assert aliases.memory(view) == ((gathered, 1),)
    assert aliases.memory(a) == ((a, None),)
    assert aliases_of(second) == [second, view]
    assert alias_root(view) == [gathered]


def test_a_wait_of_a_literal_list_shares_with_its_own_element_only() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    done = graph.call_function(ops.reduce_grad_wait.default, ([a, b],))
    second = graph.call_function(operator.getitem, (done, 1))
    last = graph.call_function(operator.getitem, (done, -1))
    aliases = Aliases(graph.nodes)
    assert aliases.memory(second) == aliases.memory(last) == ((b, None),)
    assert set(aliases.memory(done)) == {(a, None), (b, None)}
    assert alias_sources(second) == [b]
    assert aliases_of(a) == [a, done]


def test_pieces_of_a_split_share_with_the_whole() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pieces = graph.call_function(aten.split.Tensor, (x, 2))
    piece = graph.call_function(operator.getitem, (pieces, 1))
    flat = graph.call_function(aten._unsafe_view.default, (piece, [8]))
    copied = graph.call_function(aten.add.Tensor, (flat, 1))
    aliases = Aliases(graph.nodes)
    assert aliases.memory(flat) == ((x, None),)
    assert aliases.memory(copied) == ((copied, None),)
    assert aliases_of(x) == [x, pieces, piece, flat]
    assert alias_root(flat) == [x]


def test_results_of_a_tuple_have_memory_of_their_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    top = graph.call_function(aten.topk.default, (x, 2))
    values, ids = (graph.call_function(operator.getitem, (top, i)) for i in range(2))
    aliases = Aliases(graph.nodes)
    assert aliases.memory(values) == ((top, 0),)
    assert aliases.memory(ids) == ((top, 1),)


def test_keyword_arguments_are_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.view.default, (), {"self": x, "size": [16]})
    assert Aliases(graph.nodes).memory(view) == ((x, None),)
    assert alias_sources(view) == [x]
