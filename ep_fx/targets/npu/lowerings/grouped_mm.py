"""Grouped products, forward and backward, by `npu_grouped_matmul`.

    y = grouped_mm(x, w, counts, b, True)       y = npu_grouped_matmul(x, transpose(w), counts, b, 0)
    grouped_mm_backward(g, x, w, counts, ..)    dx = npu_grouped_matmul(g, w, counts, None, 0)
                                                dw = npu_grouped_matmul(t(g), x, counts, None, 2)

The kernel wants counts that add up to the rows. Behind an exchange they do: rows and counts are of one context. Where
that is not known, the rows that no expert has become a group of their own, whose weight is zero.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import matmul as kernels
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.edit import argument, first_reason, items_of, transposes, value_of

aten = torch.ops.aten
_NAME = "grouped_mm"
_COUNTS = {Role.CONTEXT: 4, Role.DISPATCH: 2}
"""Place of the counts in the result of what hands out rows."""
_SAME = frozenset({aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default})


def _apply(graph: ParallelGraph) -> None:
    for node in graph.nodes(Role.GROUPED_MM):
        _lower_one(graph, node, _forward, argument(node, 0), argument(node, 1), argument(node, 2))
    for node in graph.nodes(Role.GROUPED_MM_BACKWARD):
        _lower_one(graph, node, _backward, argument(node, 1), argument(node, 2), argument(node, 3))


def _lower_one(
    graph: ParallelGraph, node: fx.Node, lower: Any, x: fx.Node, weight: fx.Node, counts: fx.Node
) -> None:
    exact = counts_all(counts, x)
    reason = _unfit(node, x, weight, counts, exact)
    if reason is not None:
        keep(node, _NAME, reason)
        return
    with graph.graph.inserting_before(node):
        lower(graph, node, exact)


def _unfit(node: fx.Node, x: fx.Node, weight: fx.Node, counts: fx.Node, exact: bool) -> str | None:
    """Why the kernel does not take one of the three products; None where it takes all."""
    rows, matrices, sizes = value_of(x), value_of(weight), value_of(counts)
    transposed = node.args[-1]
    groups = sizes.new_empty((sizes.shape[0] + (not exact),), dtype=torch.int64)
    if not exact:
        matrices = matrices.new_empty((matrices.shape[0] + 1, *matrices.shape[1:]))
    there, back = (matrices.mT, matrices) if transposed else (matrices, matrices.mT)
    y = rows.new_empty((rows.shape[0], there.shape[-1]))
    products = ((rows, there, groups, None, 0), (y, back, groups, None, 0), (y.t(), rows, groups, None, 2))
    return first_reason(*(checked(kernels.npu_grouped_matmul, arguments).reason for arguments in products))


def counts_all(counts: fx.Node, x: fx.Node) -> bool:
    """Whether `counts` are known to add up to the rows of `x`: both come from one exchange."""
    while counts.target in _SAME and isinstance(counts.args[0], fx.Node):
        counts = counts.args[0]
    source = counts.args[0] if counts.op == "call_function" and counts.args else None
    if not isinstance(source, fx.Node) or counts.args[1:] != (_COUNTS.get(role_of(source)),):
        return False
    rows = items_of(source).get(0)
    return rows is not None and _rows(rows) == _rows(x)


def _rows(node: fx.Node) -> Any:
    """Number of rows, as an expression: rows that only a run can count have a symbol of their own."""
    rows = value_of(node).shape[0]
    return rows.node.expr if isinstance(rows, torch.SymInt) else rows


def _transposed(graph: ParallelGraph, node: fx.Node, like: fx.Node) -> fx.Node:
    """The matrices of `node` transposed, as a view; of such a view what it was made of."""
    if transposes(node):
        return argument(node, 0)
    return graph.call(aten.transpose.int, node, 1, 2, like=like, value=value_of(node).mT)


def _product(
    graph: ParallelGraph, like: fx.Node, exact: bool, x: fx.Node, weight: fx.Node, counts: fx.Node, bias: Any,
    value: Any,
) -> fx.Node:
    if not exact:
        counts, weight = _covering(graph, like, counts, x), _with_rest(graph, like, weight)
        bias = None if bias is None else _with_rest(graph, like, bias)
    arguments = (x, weight, counts, bias, 0)
    return graph.call(kernels.npu_grouped_matmul, *arguments, like=like, value=value)


def _covering(graph: ParallelGraph, like: fx.Node, counts: fx.Node, x: fx.Node) -> fx.Node:
    sizes = value_of(counts)
    value = sizes.new_empty((sizes.shape[0] + 1,), dtype=torch.int64)
    return graph.call(kernels.rest_counted, counts, x, like=like, value=value)


def _with_rest(graph: ParallelGraph, like: fx.Node, each: fx.Node) -> fx.Node:
    old = value_of(each)
    value = old.new_empty((old.shape[0] + 1, *old.shape[1:]))
    return graph.call(kernels.rest_appended, each, like=like, value=value)


def _forward(graph: ParallelGraph, node: fx.Node, exact: bool) -> None:
    x, weight, counts, bias, transposed = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and isinstance(counts, fx.Node)  # noqa: PT018
    if transposed:
        weight = _transposed(graph, weight, node)
    node.replace_all_uses_with(_product(graph, node, exact, x, weight, counts, bias, value_of(node)))


def _backward(graph: ParallelGraph, node: fx.Node, exact: bool) -> None:
    grad, x, weight, counts = (argument(node, index) for index in range(4))
    transposed, items = node.args[5], items_of(node)
    if 0 in items:
        factor = weight if transposed else _transposed(graph, weight, node)
        items[0].replace_all_uses_with(
            _product(graph, node, exact, grad, factor, counts, None, value_of(items[0]))
        )
    if 1 in items:
        left, right = (grad, x) if transposed else (x, grad)
        _replace_weight_grad(graph, node, items[1], exact, left, right, counts)
    if 2 in items and node.args[4]:
        value = value_of(items[2])
        items[2].replace_all_uses_with(graph.call(kernels.bias_grad, grad, counts, like=node, value=value))


def _replace_weight_grad(
    graph: ParallelGraph, node: fx.Node, old: fx.Node, exact: bool, left: fx.Node, right: fx.Node, counts: fx.Node
) -> None:
    """In the layout in which it is taken: of a weight that was a transposed view, the gradient is transposed back."""
    value, users = value_of(old), list(old.users)
    if not all(map(transposes, users)):
        old.replace_all_uses_with(_outer(graph, node, exact, left, right, counts, value))
        return
    value = value.new_empty((value.shape[0], value.shape[2], value.shape[1]))
    product = _outer(graph, node, exact, right, left, counts, value)
    for user in users:
        user.replace_all_uses_with(product)


def _outer(
    graph: ParallelGraph, node: fx.Node, exact: bool, left: fx.Node, right: fx.Node, counts: fx.Node, value: Any
) -> fx.Node:
    """``left_e.T @ right_e`` of every expert."""
    sizes = counts if exact else _covering(graph, node, counts, left)
    view = graph.call(aten.t.default, left, like=node, value=value_of(left).t())
    whole = value if exact else value.new_empty((value.shape[0] + 1, *value.shape[1:]))
    product = graph.call(kernels.npu_grouped_matmul, view, right, sizes, None, 2, like=node, value=whole)
    if exact:
        return product
    return graph.call(aten.slice.Tensor, product, 0, 0, value.shape[0], like=node, value=value)


GROUPED_MM = Lowering(
    name=_NAME,
    takes="ep_fx.grouped_mm, grouped_mm_backward",
    emits=("npu_grouped_matmul", "bias_grad", "rest_counted", "rest_appended"),
    fallback="the dialect's own kernel: a product for each expert, which waits for the device",
    source="aclnnGroupedMatmulV4: group_type 0 and 2, group_list_type 1",
    apply=_apply,
)


def _apply_bias(graph: ParallelGraph) -> None:
    for role, target in ((Role.ADD_BIAS, kernels.add_bias), (Role.ADD_BIAS_BACKWARD, kernels.bias_grad)):
        for node in graph.nodes(role):
            node.target = target


BIAS = Lowering(
    name="add_bias",
    takes="ep_fx.add_bias, add_bias_backward",
    emits=("add_bias", "bias_grad"),
    fallback="none is needed",
    source="the dialect's formulas, without an assertion that would run on the CPU",
    apply=_apply_bias,
)
