"""What each operator makes of values of which the ranks along `tp` hold parts.

    x @ w1 (rows of w1 cut)   ->  cut        silu(cut) * cut  ->  cut        cut @ w2 (columns cut)  ->  summand
    summand * s, sum(summand) ->  summand    all_reduce(summand) over tp  ->  all of it

For an operator of which this is not known, a value that is not whole is refused.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ep_fx.graph import Role, target_name
from ep_fx.graph.zeros import is_zero
from ep_fx.verify.cut_forms import FORMS, SHAPE_ONLY, moved
from ep_fx.verify.cuts import SUMMAND, Cut, NotKnownError, State, is_data, shape_of, state_of
from ep_fx.verify.reading import arg, flat_nodes


# -- products ----------------------------------------------------------------------------------------------------------
class _Product(NamedTuple):
    """``out = left x right``: which dimensions are summed, and where the others go."""

    summed: tuple[int, int]
    left: dict[int, int]
    right: dict[int, int]


def _product(left: State, right: State, how: _Product) -> State:
    if SUMMAND in (left, right):
        if left is None or right is None:
            return SUMMAND
        raise NotKnownError("a product in which one factor at most is not whole, or both are cut where it sums")
    if left is None and right is None:
        return None
    if isinstance(left, Cut) and isinstance(right, Cut):
        if (left.dim, right.dim) == how.summed and left.blocks == right.blocks:
            return SUMMAND
        raise NotKnownError("a product in which both factors are cut alike along the dimension that it sums")
    one, places = (left, how.left) if isinstance(left, Cut) else (right, how.right)
    if not isinstance(one, Cut) or one.dim not in places:
        raise NotKnownError("a product whose other factor is cut too where it sums")
    return Cut(places[one.dim], one.blocks)


_MM = _Product((1, 0), {0: 0}, {1: 1})
_BMM = _Product((2, 1), {1: 1}, {2: 2})


def _grouped(transposed: bool) -> _Product:
    """Rows ``[R, in]`` by weights ``[E, out, in]`` if transposed, else ``[E, in, out]``."""
    return _Product((1, 2), {}, {1: 1}) if transposed else _Product((1, 1), {}, {2: 1})


def _grouped_mm(node: fx.Node, states: dict[fx.Node, Any]) -> State:
    result = _product(state_of(states, arg(node, 0)), state_of(states, arg(node, 1)), _grouped(bool(arg(node, 4))))
    bias = arg(node, 3)
    if bias is not None and (result is SUMMAND or state_of(states, bias) != result):
        raise NotKnownError("a bias that is cut as the result is, or added once behind the sum (add_bias)")
    return result


def _grouped_mm_backward(node: fx.Node, states: dict[fx.Node, Any]) -> tuple[State, ...]:
    grad, x, weight = (state_of(states, arg(node, i)) for i in range(3))
    transposed = bool(arg(node, 5))
    outs = {1: 1} if transposed else {1: 2}
    ins = {1: 2} if transposed else {1: 1}
    of_weight = _product(grad, x, _Product((-1, -1), outs, ins))
    return _product(grad, weight, _grouped(not transposed)), of_weight, grad


# -- elements ----------------------------------------------------------------------------------------------------------
_SUMS = frozenset({"aten::add", "aten::sub", "aten::add_", "aten::sub_"})
_SCALES = frozenset({"aten::mul", "aten::mul_", "aten::div", "aten::div_"})
_HANDED_ON = frozenset({"aten::neg", "aten::_to_copy", "aten::clone", "aten::detach", "aten::alias", "aten::copy_"})
_CHOICES = frozenset({"aten::where", "aten::masked_fill"})


def _pointwise(node: fx.Node, states: dict[fx.Node, Any]) -> State:
    tensors = [n for n in flat_nodes((node.args, node.kwargs)) if isinstance(n.meta.get("val"), torch.Tensor)]
    found = {n: state_of(states, n) for n in tensors}
    if SUMMAND in found.values():
        return _of_summands(node, found)
    rank = len(shape_of(node))
    cuts = {Cut(s.dim - len(shape_of(n)) + rank, s.blocks) for n, s in found.items() if isinstance(s, Cut)}
    if len(cuts) != 1:
        raise NotKnownError("values cut alike")
    return cuts.pop()


def _of_summands(node: fx.Node, found: dict[fx.Node, State]) -> State:
    """Of summands, what is linear: sums of them, scales by whole values, zeros in places that all ranks choose."""
    name, operands = target_name(node), node.args
    summands = [v for v in operands if isinstance(v, fx.Node) and found.get(v) is SUMMAND]
    others = [n for n, state in found.items() if state is not SUMMAND]
    zeros = all(found[n] is None and is_zero(n) for n in others if is_data(n))
    if name in _HANDED_ON and not others:
        return SUMMAND
    if name in _SUMS and zeros and all(isinstance(v, fx.Node) for v in operands[:2]):
        return SUMMAND
    if name in _SCALES and len(summands) == 1 and all(found[n] is None for n in others):
        is_divisor = name.startswith("aten::div") and (operands[0] not in summands or node.kwargs)
        if not is_divisor:
            return SUMMAND
    numbers = [v for v in operands if isinstance(v, (int, float))]
    if name in _CHOICES and zeros and not any(numbers):
        return SUMMAND
    raise NotKnownError("the sum over tp first: of summands only sums and scales may be taken")


def _linear(node: fx.Node, states: dict[fx.Node, Any]) -> State:
    data = [n for n in flat_nodes((node.args, node.kwargs)) if is_data(n)]
    if all(state_of(states, n) is SUMMAND or (state_of(states, n) is None and is_zero(n)) for n in data):
        return SUMMAND
    raise NotKnownError("summands alone: what every rank has would be counted once for each")


# -- nodes -------------------------------------------------------------------------------------------------------------
_SAME = frozenset({Role.PAD_SHARD, Role.UNPAD_SHARD, Role.ASSEMBLE, Role.DISASSEMBLE, Role.WAIT})
_LISTS = frozenset(
    {
        Role.UNSHARD, Role.UNSHARD_WAIT, Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.REDUCE_GRAD_WAIT,
        Role.SCALE_GRAD,
    }
)


def follow(node: fx.Node, role: Role, states: dict[fx.Node, Any]) -> Any:
    """What the ranks hold of the result of `node`; for a list, of each element.

    Args:
        states: of its arguments; those that are missing are whole.

    Raises:
        NotKnownError: `node` must not be given what the ranks hold.
    """
    if role is Role.GETITEM:
        source = states.get(node.args[0])  # type: ignore[arg-type]
        return source[node.args[1]] if isinstance(source, tuple) else source  # type: ignore[index]
    if role in _LISTS:
        given = arg(node, 0)
        return states.get(given) if isinstance(given, fx.Node) else tuple(state_of(states, item) for item in given)
    if role in _SAME:
        return state_of(states, arg(node, 0))
    if role is Role.GROUPED_MM:
        return _grouped_mm(node, states)
    if role is Role.GROUPED_MM_BACKWARD:
        return _grouped_mm_backward(node, states)
    if role is Role.ADD_BIAS_BACKWARD:
        return state_of(states, arg(node, 0))
    name = target_name(node)
    if name in ("aten::mm", "aten::bmm"):
        how = _MM if name == "aten::mm" else _BMM
        return _product(state_of(states, arg(node, 0)), state_of(states, arg(node, 1)), how)
    if role is Role.RESHARD or name in SHAPE_ONLY:
        return None
    summands = any(state_of(states, source) is SUMMAND for source in node._input_nodes)
    if name in FORMS:
        return _linear(node, states) if summands else moved(node, states)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in _SUMS | _HANDED_ON | _CHOICES:
        return _pointwise(node, states)
    raise NotKnownError("the sum over tp first" if summands else "an operator of which it is known what it does to it")
