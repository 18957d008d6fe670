"""What becomes of single nodes of an MoE layer."""
from __future__ import annotations

import operator

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.ops import dispatch_context
from ep_fx.targets.npu import lower
from ep_fx.targets.npu.lowering import kept_reason
from tests.npu.joint import graph_of, record
from tests.npu.lowered import called, tiny_for_npu

ops = torch.ops.ep_fx
DIALECT = (Role.PERMUTE, Role.PERMUTE_BACKWARD, Role.UNPERMUTE, Role.UNPERMUTE_BACKWARD, Role.REGROUP, Role.UNGROUP,
           Role.GROUPED_MM, Role.GROUPED_MM_BACKWARD)  # fmt: skip


def test_double_stays_with_the_dialect_and_says_why() -> None:
    graph = tiny_for_npu(torch.float64, blocks=1, grouped=True).lowered
    kept = {role_of(node): kept_reason(node) for node in graph if role_of(node) in DIALECT}
    assert set(kept) == {Role.REGROUP, Role.UNGROUP, Role.GROUPED_MM, Role.GROUPED_MM_BACKWARD}
    assert all(reason is not None and "float64" in reason for reason in kept.values())


def test_separate_weights_are_put_together_once_a_direction() -> None:
    """Behind their gather and before they are freed; what was cast or transposed by itself is gone."""
    module = tiny_for_npu(blocks=1, grouped=True)
    position = module.lowered.positions()
    joined = [node for node in module.lowered if node.target is torch.ops.aten.cat.default and "experts" in _fqn(node)]
    assert len(joined) == 2
    for node in joined:
        (freed,) = {user for weight in node.all_input_nodes for user in weight.users if role_of(user) is Role.RESHARD}
        assert position[node] < position[freed]


def _fqn(node: fx.Node) -> str:
    return node.meta["ep_fx"].fqn or ""


def _exchange(*readers: str) -> tuple[ParallelGraph, list[torch.Tensor]]:
    """A context whose order is read by operators of the dialect of these names."""
    graph = graph_of(fx.Graph())
    rows, sent, received = (graph.graph.placeholder(name) for name in ("rows", "sent", "received"))
    context = graph.call(dispatch_context, sent, received, 8, 2, "experts")
    order = graph.call(operator.getitem, context, 0)
    results = [graph.call(getattr(ops, name).default, rows, order) for name in readers]
    graph.graph.output(tuple(results))
    inputs = [torch.ones(8, 4), torch.tensor([3, 0, 1, 4]), torch.tensor([3, 0, 1, 4])]
    record(graph, *inputs)
    return graph, inputs


def test_the_first_that_reads_the_order_sorts() -> None:
    lowered = lower(_exchange("ungroup", "regroup", "ungroup")[0])
    (permuted,) = called(lowered, "npu_moe_token_permute")
    assert [str(user.args[1]) for user in permuted.users] == ["1"]  # rows that are not asked for are not taken
    assert len(called(lowered, "npu_moe_token_unpermute")) == 2
    assert len(called(lowered, "npu_moe_token_unpermute_grad_v2")) == 1


def test_an_order_that_something_else_reads_stays_the_dialects() -> None:
    graph, inputs = _exchange("regroup")
    order = next(node for node in graph if role_of(node) is Role.REGROUP).args[1]
    assert isinstance(order, fx.Node)
    with graph.graph.inserting_before(graph.output):
        total = graph.call(torch.ops.aten.sum.default, order)
    graph.output.args = ((*graph.output.args[0], total),)  # type: ignore[misc]
    record(graph, *inputs)
    lowered = lower(graph)
    (kept,) = lowered.nodes(Role.REGROUP)
    assert "permuted_indices are read by %sum" in str(kept_reason(kept))
    assert next(node for node in lowered if role_of(node) is Role.CONTEXT).target is dispatch_context
