"""The exchange of a region and the product at its end, as one kernel (A3 only; off by default).

    forward    y = gmm(regroup(a2a(x)), w)     ->  y, rows = npu_alltoallv_gmm(x, w, sent, received)
               y = a2a(ungroup(gmm(h, w)))     ->  y = npu_gmm_alltoallv(h, w, received, sent)
    backward   the same two, with the other kernel's counts and the weight transposed

Behind `REGROUP` and `GROUPED_MM`. All exchanges of a region are fused or none is, as without the sort no order is known
to the others. A fused node stands where its product stood, so its weight is there.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import exchange, matmul, routing
from ep_fx.targets.npu.kernels.context import dispatch_context
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.edit import argument, item, items_of, value_of

_NAME = "fused_exchange"
_EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_TRANSPOSE = torch.ops.aten.transpose.int
_ERASED = frozenset(
    {
        _EXCHANGE, _WAIT, _TRANSPOSE, matmul.npu_grouped_matmul, routing.npu_moe_token_permute,
        routing.npu_moe_token_unpermute, routing.npu_moe_token_unpermute_grad_v2,
        routing.npu_moe_token_permute_grad_v2, operator.getitem,
    }
)  # fmt: skip
"""What a fused kernel stands for."""


class _Entry(NamedTuple):
    """An exchange and the product of what it brings.

    Args:
        sent: rows that go out.
        regrouped: what puts those that come in order of their experts.
        rows: the result of that.
        product: of these rows.
    """

    sent: fx.Node
    regrouped: fx.Node
    rows: fx.Node
    product: fx.Node


class _Exit(NamedTuple):
    """A product and the exchange of its result.

    Args:
        product: the product.
        ungrouped: what puts its rows in order of the ranks.
        back: the rows that come back.
    """

    product: fx.Node
    ungrouped: fx.Node
    back: fx.Node


class _UnfitError(Exception):
    """Why a region is left as it is."""


def _apply(soc: str, graph: ParallelGraph) -> None:
    for context in [node for node in graph if node.target is dispatch_context]:
        position = {node: index for index, node in enumerate(graph)}
        try:
            entries, exits = _region(context, position)
            for entry in entries:
                _check(context, exchange.npu_alltoallv_gmm, entry.sent, entry.product, soc)
            for found in exits:
                _check(context, exchange.npu_gmm_alltoallv, argument(found.product, 0), found.product, soc)
        except _UnfitError as reason:
            for node in _exchanges(context):
                keep(node, _NAME, str(reason))
            continue
        _fuse(graph, context, entries, exits)


def _exchanges(context: fx.Node) -> list[fx.Node]:
    """The exchanges of rows that read the splits of a context."""
    splits = [node for index, node in items_of(context).items() if index in (1, 2)]
    return list(dict.fromkeys(user for node in splits for user in node.users if user.target is _EXCHANGE))


# -- reading -----------------------------------------------------------------------------------------------------------
def _region(context: fx.Node, position: dict[fx.Node, int]) -> tuple[list[_Entry], list[_Exit]]:
    items = items_of(context)
    sorts = list(items[0].users) if 0 in items else []
    if len(sorts) != 1 or sorts[0].target is not routing.npu_moe_token_permute:
        raise _UnfitError("its rows are not put in order by one npu_moe_token_permute")
    sorted_items = items_of(sorts[0])
    entries, exits = [_entry(sorts[0], context, position)], []
    for reader in list(sorted_items[1].users) if 1 in sorted_items else []:
        if reader.target is routing.npu_moe_token_unpermute_grad_v2:
            entries.append(_entry(reader, context, position))
        else:
            exits.append(_exit(reader, context))
    fused = {_exchange_of(entry.regrouped) for entry in entries} | {_next(found.ungrouped) for found in exits}
    both = {entry.product for entry in entries} & {found.product for found in exits}
    if both:
        raise _UnfitError(f"%{both.pop().name} is the only product between two exchanges")
    others = [node.name for node in _exchanges(context) if node not in fused]
    if others:
        raise _UnfitError(f"%{others[0]} exchanges with the same splits and no product")
    return entries, exits


def _entry(regrouped: fx.Node, context: fx.Node, position: dict[fx.Node, int]) -> _Entry:
    moving = _exchange_of(regrouped)
    rows = items_of(regrouped).get(0)
    readers = [] if rows is None else list(rows.users)
    products = [node for node in readers if _is_product(node) and node.args[0] is rows]
    if rows is None or len(products) != 1:
        raise _UnfitError(f"the rows of %{moving.name} are read by {len(products)} grouped products, not by one")
    _check_product(products[0], context)
    early = [node.name for node in readers if position[node] < position[products[0]]]
    if early:
        raise _UnfitError(f"%{early[0]} reads the rows of %{moving.name} before their product does")
    return _Entry(argument(moving, 0), regrouped, rows, products[0])


def _exchange_of(regrouped: fx.Node) -> fx.Node:
    """The exchange whose rows a node puts in order, where nobody else reads them."""
    wait = argument(regrouped, 0)
    moving = wait.args[0]
    if wait.target is not _WAIT or not isinstance(moving, fx.Node) or moving.target is not _EXCHANGE:
        raise _UnfitError(f"%{regrouped.name} does not read an exchange")
    if set(wait.users) != {regrouped} or set(moving.users) != {wait}:
        raise _UnfitError(f"the rows of %{moving.name} are read by others before they are in order")
    return moving


def _exit(ungrouped: fx.Node, context: fx.Node) -> _Exit:
    if ungrouped.target not in (routing.npu_moe_token_unpermute, routing.npu_moe_token_permute_grad_v2):
        raise _UnfitError(f"%{ungrouped.name} reads the order of the rows")
    product = argument(ungrouped, 0)
    if not _is_product(product) or set(product.users) != {ungrouped}:
        raise _UnfitError(f"%{ungrouped.name} does not read the result of a grouped product that nobody else reads")
    _check_product(product, context)
    moving = _next(ungrouped)
    back = next(iter(moving.users)) if len(moving.users) == 1 else None
    if moving.target is not _EXCHANGE or back is None or back.target is not _WAIT:
        raise _UnfitError(f"the rows of %{ungrouped.name} are not what one exchange sends")
    return _Exit(product, ungrouped, back)


def _next(node: fx.Node) -> fx.Node:
    if len(node.users) != 1:
        raise _UnfitError(f"%{node.name} has {len(node.users)} readers, not one")
    return next(iter(node.users))


def _is_product(node: fx.Node) -> bool:
    return node.target is matmul.npu_grouped_matmul and node.args[4:] in ((), (0,))


def _check_product(product: fx.Node, context: fx.Node) -> None:
    if len(product.args) > 3 and product.args[3] is not None:
        raise _UnfitError(f"%{product.name} adds biases")
    if product.args[2] is not items_of(context).get(4):
        raise _UnfitError(f"the counts of %{product.name} are not those of this exchange")


# -- conditions --------------------------------------------------------------------------------------------------------
def _check(context: fx.Node, kernel: Callable[..., Any], rows: fx.Node, product: fx.Node, soc: str) -> None:
    weight, transposed = _weight(product)
    counts = _unknown(context)
    reason = checked(kernel, (rows, weight, counts, counts, "group", transposed), soc=soc).reason
    if reason is not None:
        raise _UnfitError(reason)


def _unknown(context: fx.Node) -> tuple[None, ...]:
    """As many counts as there are experts, none of them known before a run."""
    return (None,) * int(value_of(argument(context, 0)).shape[0])


def _weight(product: fx.Node) -> tuple[fx.Node, bool]:
    """The matrices of a product, and whether the kernel is to take them transposed: it does not take a view."""
    weight = argument(product, 1)
    if weight.target is _TRANSPOSE and sorted(int(d) % 3 for d in weight.args[1:]) == [1, 2]:  # type: ignore[arg-type]
        return argument(weight, 0), True
    return weight, False


# -- rewriting ---------------------------------------------------------------------------------------------------------
def _fuse(graph: ParallelGraph, context: fx.Node, entries: list[_Entry], exits: list[_Exit]) -> None:
    group = _exchange_of(entries[0].regrouped).args[3]
    known = items_of(context)
    with graph.graph.inserting_before(context):
        whole = graph.call(exchange.exchange_context, *context.args, like=context)
        fields = [item(graph, whole, index) for index in range(5)]
    sent, received = fields[:2]
    sent.meta["val"] = received.meta["val"] = _unknown(context)
    if 4 in known:
        fields[4].meta["val"] = value_of(known[4])
    for found in exits:
        _replace_exit(graph, found, (received, sent, group))
    for entry in entries:
        _replace_entry(graph, entry, (sent, received, group))
    for old, new in ((1, 2), (3, 3), (4, 4)):
        if old in known:
            known[old].replace_all_uses_with(fields[new])
    for node in (*reversed(list(context.users)), context):
        if not node.users:
            graph.graph.erase_node(node)


def _replace_entry(graph: ParallelGraph, entry: _Entry, counts: tuple[Any, ...]) -> None:
    product = entry.product
    weight, transposed = _weight(product)
    with graph.graph.inserting_before(product):
        fused = graph.call(
            exchange.npu_alltoallv_gmm, entry.sent, weight, *counts, transposed, like=entry.regrouped,
            value=(value_of(product), value_of(entry.rows)),
        )  # fmt: skip
        y, rows = item(graph, fused, 0), item(graph, fused, 1)
    product.replace_all_uses_with(y)
    entry.rows.replace_all_uses_with(rows, delete_user_cb=lambda user: user is not product)
    _erase(graph, product)


def _replace_exit(graph: ParallelGraph, found: _Exit, counts: tuple[Any, ...]) -> None:
    weight, transposed = _weight(found.product)
    with graph.graph.inserting_before(found.product):
        fused = graph.call(
            exchange.npu_gmm_alltoallv, argument(found.product, 0), weight, *counts, transposed, like=found.ungrouped,
            value=value_of(found.back),
        )  # fmt: skip
    found.back.replace_all_uses_with(fused)
    _erase(graph, found.back)


def _erase(graph: ParallelGraph, node: fx.Node) -> None:
    """Erases a node that nobody reads, and what was read by it alone, as far as the exchange."""
    pending = [node]
    while pending:
        current = pending.pop()
        if current.users or current.target not in _ERASED:
            continue
        pending += current.all_input_nodes
        graph.graph.erase_node(current)


def fused_exchange(soc: str) -> Lowering:
    """The line of the table, for a chip."""
    return Lowering(
        name=_NAME,
        takes="all_to_all_single with npu_moe_token_permute or _unpermute and npu_grouped_matmul",
        emits=("exchange_context", "npu_alltoallv_gmm", "npu_gmm_alltoallv"),
        fallback="the exchange, the order and the product as nodes of their own",
        source="aclnnAlltoAllvGroupedMatMul, aclnnGroupedMatMulAlltoAllv",
        apply=partial(_apply, soc),
    )
