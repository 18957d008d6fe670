"""Rule `types`: what is recorded of a value is what its operator gives.

Each operator runs again on the recorded fake arguments; shape, dtype, device and strides of the result must be those
recorded, where sizes known only at run time may have other names. Nodes without a record take the result for those
after them. In-place operators give back their argument. Up to 1 ms a node, so the rule runs only when asked for.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ep_fx.graph import is_mutation
from ep_fx.verify.facts import Facts
from ep_fx.verify.reading import flat_nodes
from ep_fx.verify.rule import Violation, rule


@rule("types", "propagating fake tensors anew gives the recorded shape, dtype, device and strides", optional=True)
def types(facts: Facts) -> Iterator[Violation]:
    known = {node: node.meta["val"] for node in facts.nodes if node.meta.get("val") is not None}
    mode = detect_fake_mode([v for v in known.values() if isinstance(v, torch.Tensor)])
    if mode is None:
        return
    names: dict[sympy.Symbol, sympy.Expr] = {}
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(enable_python_dispatcher())  # without it composite kernels read sizes, and specialise
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(mode.shape_env.suppress_guards())
        for node in facts.nodes:
            if _is_checkable(node, known):
                yield from _check(facts, node, known, names)


def _is_checkable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not is_mutation(node) and all(i in known for i in flat_nodes((node.args, node.kwargs)))


def _check(
    facts: Facts, node: fx.Node, known: dict[fx.Node, Any], names: dict[sympy.Symbol, sympy.Expr]
) -> Iterator[Violation]:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    target = cast(torch._ops.OpOverload, node.target)
    try:
        result = target(*args, **kwargs)
    except GuardOnDataDependentSymNode:
        return  # a kernel that asks for a size known at run time only: nothing to compare
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        first = str(error).strip().split("\n")[0]
        yield Violation(node, "arguments that the operator accepts", first, "make the types of its arguments fit")
        return
    if node not in known:
        known[node] = result
        return
    facts.checked += 1
    if (found := difference(result, known[node], names)) is not None:
        yield Violation(node, f"recorded: {found[1]}", f"computed: {found[0]}", "record what the node gives")


def difference(
    new: Any, old: Any, names: dict[sympy.Symbol, sympy.Expr], *, strides: bool = True
) -> tuple[str, str] | None:
    """Texts of what was computed and what was recorded, None where they agree (in `strides` too)."""
    if isinstance(new, (list, tuple)) and isinstance(old, (list, tuple)):
        if len(new) != len(old):
            return f"{len(new)} results", f"{len(old)} results"
        pairs = zip(new, old, strict=True)
        found = (difference(a, b, names, strides=strides) for a, b in pairs)
        return next((d for d in found if d is not None), None)
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        same = (new.dtype, new.device, new.dim()) == (old.dtype, old.device, old.dim())
        same = same and all(_same(a, b, names) for a, b in zip(new.shape, old.shape, strict=True))
        same = same and (not strides or _is_empty(old) or _same_strides(new, old, names))
        return None if same else (_text(new), _text(old))
    return None if _same(new, old, names) else (repr(new), repr(old))


def _same_strides(new: torch.Tensor, old: torch.Tensor, names: dict[sympy.Symbol, sympy.Expr]) -> bool:
    sizes = zip(new.stride(), old.stride(), old.shape, strict=True)
    return all(_is_one(size) or _same(a, b, names) for a, b, size in sizes)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _is_empty(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in tensor.shape)


def _same(new: Any, old: Any, names: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """Equal, once every symbol that this run made up stands for what was recorded in its place."""
    left, right = _expression(new), _expression(old)
    if left is None or right is None:
        return left is right
    if left == right:
        return True
    if isinstance(left, sympy.Symbol) and left not in names and left.name.startswith(("u", "zu")):
        names[left] = right
    if not isinstance(left, sympy.Basic) or not isinstance(right, sympy.Basic):
        return False
    left = left.xreplace(names)
    return bool(left == right) or _same_values(left, right)


def _same_values(left: sympy.Basic, right: sympy.Basic) -> bool:
    """Whether two expressions that are not written alike, such as ``s*s // s`` and ``s``, agree on trial sizes."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    for trial in _TRIALS if symbols else ():
        sizes = {symbol: sympy.Integer(trial + 3 * index) for index, symbol in enumerate(symbols)}
        if left.xreplace(sizes) != right.xreplace(sizes):
            return False
    return bool(symbols)


_TRIALS = (2, 5, 8, 12, 23, 64)


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device}"
