"""Rule `rows`: what permutes and multiplies rows of experts speaks of the same rows.

Shapes do not tell rows of one layer from those of another. Here each value that holds such rows has an order: that of
the experts to which some ids send them, or that in which a context's rows arrive. Orders flow from the kernels that
make them through exchanges and through what treats each row by itself; anywhere else they are not known, and nothing
is said. Ids that are computed alike are the same ids.

    rows, sorted_indices = permute(x, ids)     rows: in the order of ids; unpermute and all gradients want this order
    grouped_matmul(rows, w, counts)            rows: in the order whose counts these are
"""
from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ep_fx.graph import Role, is_mutation, role_of
from ep_fx.targets.npu.kernels import activation, matmul, routing
from ep_fx.targets.npu.kernels.context import dispatch_context
from ep_fx.verify import Facts, Violation, rule

aten = torch.ops.aten
_SAME = frozenset({aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default})
_AS_THEY_STAND = frozenset(
    {
        *_SAME, aten.mm.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
        activation.npu_swiglu, activation.npu_swiglu_backward, matmul.add_bias,
    }
)  # fmt: skip
"""What treats each row by itself, by its first arguments, where the number of rows stays; besides what is pointwise."""
_TURNS = frozenset({aten.t.default, aten.transpose.int})
_PASSES = frozenset({Role.WAIT, Role.SEND_ROWS, Role.PAD_ROWS})
_IDS, _IN, _OUT, _COUNTS = 0, 1, 2, 4
"""Fields of a context."""
_REMEDY = "pass what belongs to the same permute, of the same layer"


@rule("rows", "rows, their order, their counts and their weights belong to one permute")
def rows(facts: Facts) -> Iterator[Violation]:
    walk = _Walk()
    for node in facts.nodes:
        if node.op == "call_function":
            yield from walk.step(node)
    yield from walk.weights()
    facts.checked += walk.checked


class _Walk:
    """What is known of the nodes so far.

    An order is ``("sorted", ids)``, in the order of experts, or ``("given", ids)``, in which the ids themselves stand;
    the second is known of the ids of a context only: of tokens there is one order.
    """

    def __init__(self) -> None:
        self.checked = 0
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[Any, int] = {}
        self._orders: dict[fx.Node, Any] = {}
        self._sent: dict[int, Any] = {}
        self._combined: dict[Any, list[tuple[Any, Any]]] = {}
        self._returned: list[tuple[fx.Node, Any, Any, Any]] = []

    def step(self, node: fx.Node) -> Iterator[Violation]:
        """Enters `node`, whose arguments are entered."""
        self._number(node)
        target, role = node.target, role_of(node)
        if target is routing.npu_moe_token_permute:
            yield from self._permute(node)
        elif target in _READERS:
            yield from self._reader(node)
        elif target is matmul.npu_grouped_matmul or target is matmul.npu_grouped_matmul_add_:
            yield from self._product(node)
        elif role is Role.EXCHANGE:
            yield from self._exchange(node)
        elif target is operator.getitem:
            self._item(node)
        else:
            self._carry(node, role)

    # -- values --------------------------------------------------------------------------------------------------------
    def _number(self, node: fx.Node) -> None:
        """Nodes that compute the same of the same have one number."""
        if node.target in _SAME and isinstance(node.args[0], fx.Node):
            self._numbers[node] = self._of(node.args[0])
            return
        if is_mutation(node) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            self._numbers[node] = -id(node)
            return
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda value: ("%", self._of(value)))
        self._numbers[node] = self._known.setdefault((id(node.target), _hashable(arguments)), len(self._known))

    def _of(self, value: Any) -> Any:
        return self._numbers.setdefault(value, -id(value)) if isinstance(value, fx.Node) else value

    def _field(self, value: Any, index: int) -> fx.Node | None:
        """The context of which `value` is a field; None where it is none."""
        source = _item_of(value, index)
        return source if source is not None and source.target is dispatch_context else None

    def _sorted_by(self, value: Any) -> Any:
        """The ids by which the permute sorted whose sorted_indices `value` is; None where it is none."""
        permute = _item_of(value, 1)
        if permute is None or permute.target is not routing.npu_moe_token_permute:
            return None
        return self._of(permute.args[1])

    # -- orders --------------------------------------------------------------------------------------------------------
    def _expect(self, node: fx.Node, value: Any, order: Any, what: str) -> Iterator[Violation]:
        found = self._orders.get(value) if isinstance(value, fx.Node) else None
        self.checked += 1
        if found is not None and order is not None and found != order:
            yield Violation(node, what, f"%{value.name}, rows in another order", _REMEDY)

    def _permute(self, node: fx.Node) -> Iterator[Violation]:
        tokens, ids = node.args[:2]
        if self._field(ids, _IDS) is not None:
            yield from self._expect(node, tokens, ("given", self._of(ids)), "rows as they arrived with these ids")
        self._orders[node] = ("sorted", self._of(ids))

    def _reader(self, node: fx.Node) -> Iterator[Violation]:
        ids = self._sorted_by(node.args[1])
        self.checked += 1
        if ids is None:
            got = getattr(node.args[1], "name", node.args[1])
            yield Violation(node, "sorted_indices of an npu_moe_token_permute", f"%{got}", _REMEDY)
            return
        arrived = ("given", ids) if self._is_context(node.args[1]) else None
        rows, order = _argument(node, 0, "rows"), ("sorted", ids)
        if node.target is routing.npu_moe_token_unpermute_grad_v2:
            probs, given = _argument(node, 2, "probs"), _argument(node, 3, "rows")
            yield from self._expect(node, rows, arrived, "gradients in the order in which forward gave the rows")
            yield from self._expect(node, given, order, "the rows of the permute whose sorted_indices these are")
            self._orders[node] = order
            self._returned.append((node, ids, self._of(probs), self._of(given)))
            return
        yield from self._expect(node, rows, order, "the rows of the permute whose sorted_indices these are")
        if arrived is not None:
            self._orders[node] = arrived
        if node.target is routing.npu_moe_token_unpermute:
            self._combined.setdefault(ids, []).append((self._of(_argument(node, 2, "probs")), self._of(rows)))

    def _is_context(self, sorted_indices: Any) -> bool:
        permute = _item_of(sorted_indices, 1)
        return permute is not None and self._field(permute.args[1], _IDS) is not None

    def _product(self, node: fx.Node) -> Iterator[Violation]:
        x, other, counts = node.args[:3]
        by_columns = node.target is matmul.npu_grouped_matmul and _argument(node, 4, "group_type") == 2
        summed = by_columns or node.target is matmul.npu_grouped_matmul_add_
        order = self._order_of_counts(counts)
        base = x.args[0] if by_columns and isinstance(x, fx.Node) and x.target in _TURNS else x
        for value in (base, other) if summed else (base,):
            yield from self._expect(node, value, order, "rows in the order of the experts whose counts these are")
        if not summed and isinstance(x, fx.Node) and x in self._orders:
            self._orders[node] = self._orders[x]

    def _order_of_counts(self, counts: Any) -> Any:
        counts = _plain(counts)
        while isinstance(counts, fx.Node) and counts.target is matmul.rest_counted:
            counts = _plain(counts.args[0])
        if isinstance(counts, fx.Node) and counts.target is routing.tokens_per_expert:
            return "sorted", self._of(counts.args[0])
        context = self._field(counts, _COUNTS)
        if context is None:
            return None
        ids = next((user for user in context.users if _item_of(user, _IDS) is context), None)
        return None if ids is None else ("sorted", self._of(ids))

    def _exchange(self, node: fx.Node) -> Iterator[Violation]:
        """Rows to the experts or back: the splits say of which context, and in which direction."""
        value, taken = node.args[0], node.args[1]
        sends, returns = self._field(taken, _OUT), self._field(taken, _IN)
        context = sends or returns
        if context is None or not isinstance(value, fx.Node):
            return
        key = self._of(context)
        ids = next((user for user in context.users if _item_of(user, _IDS) is context), None)
        arrived = None if ids is None else ("given", self._of(ids))
        if sends is not None:
            found = self._orders.get(value)
            sent = self._order_of_counts(context.args[0]) or self._sent.get(key)
            yield from self._expect(node, value, sent, "rows in the order whose counts the context has")
            self._sent.setdefault(key, sent if found is None else found)
        else:
            yield from self._expect(node, value, arrived, "rows in the order in which they arrived")
        result = arrived if sends is not None else self._sent.get(key)
        if result is not None:
            self._orders[node] = result

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        if not isinstance(source, fx.Node) or source not in self._orders:
            return
        moves = source.target in _READERS or source.target is routing.npu_moe_token_permute
        if index == 0 if moves else _keeps_rows(node, source):
            self._orders[node] = self._orders[source]

    def _carry(self, node: fx.Node, role: Role) -> None:
        if role in _PASSES:
            sources: list[Any] = [node.args[0]]
        elif node.target in _AS_THEY_STAND:
            sources = [node.args[0]]
        elif node.target is aten.cat.default or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            sources = list(node.all_input_nodes)
        else:
            return
        found = {self._orders[v] for v in sources if v in self._orders and (role in _PASSES or _keeps_rows(node, v))}
        if len(found) == 1:
            self._orders[node] = found.pop()

    # -- weights -------------------------------------------------------------------------------------------------------
    def weights(self) -> Iterator[Violation]:
        """Backward has the weights, and the rows, that forward had."""
        for node, ids, probs, rows in self._returned:
            forward = self._combined.get(ids)
            if not forward:
                continue
            self.checked += 1
            if not any(weights == probs and (probs is None or rows == given) for weights, given in forward):
                yield Violation(
                    node, "the probs and rows of an npu_moe_token_unpermute with these sorted_indices",
                    f"%{getattr(_argument(node, 2, 'probs'), 'name', 'no probs')}, which none of them has", _REMEDY,
                )  # fmt: skip


_READERS: frozenset[Any] = frozenset(
    {
        routing.npu_moe_token_unpermute, routing.npu_moe_token_unpermute_grad_v2,
        routing.npu_moe_token_permute_grad_v2,
    }
)  # fmt: skip


def _argument(node: fx.Node, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _plain(value: Any) -> Any:
    """`value` before conversions and copies."""
    while isinstance(value, fx.Node) and value.target in _SAME:
        value = value.args[0]
    return value


def _item_of(value: Any, index: int) -> fx.Node | None:
    """The node of which `value` is this element."""
    value = _plain(value)
    if not isinstance(value, fx.Node) or value.target is not operator.getitem or value.args[1] != index:
        return None
    return value.args[0] if isinstance(value.args[0], fx.Node) else None


def _keeps_rows(node: fx.Node, source: Any) -> bool:
    """Whether both have as many rows, the (first) tensors of lists."""
    rows = _rows(node)
    return rows is not None and rows == _rows(source)


def _rows(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    size = value.shape[0]
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", _hashable(value.start), _hashable(value.stop), _hashable(value.step)
    return type(value).__name__, value
