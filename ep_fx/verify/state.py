"""Rule `no-state`: a graph is a function of its placeholders; nothing is kept, shared or hidden between calls.

Allowed targets are operators, the functions of ``ep_fx.ops``, getitem, and arithmetic on sizes. Arguments are nodes
and literals. In-place writes reach buffers that the Manifest calls mutated, or memory that the graph itself made.
"""
from __future__ import annotations

import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ep_fx.graph import target_name
from ep_fx.graph.effects import written_by
from ep_fx.verify.facts import Facts
from ep_fx.verify.rule import Violation, rule

_ARITHMETIC_MODULES = frozenset({"_operator", "operator", "math"})
_ARITHMETIC_BUILTINS = frozenset({abs, bool, float, int, max, min, pow, round, sum})
_WRITING = frozenset({"setitem", "delitem", "iadd", "isub", "imul", "iconcat", "attrgetter", "methodcaller", "call"})
_SCALARS = frozenset({int, float, bool, complex, str, type(None), type(Ellipsis)})
_LITERALS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@rule("no-state", "no attribute is read or written, no object is captured: operators on nodes and literals only")
def no_state(facts: Facts) -> Iterator[Violation]:
    facts.checked += len(facts.nodes)
    for node in facts.nodes:
        if node.op == "call_function":
            if not isinstance(node.target, torch._ops.OpOverload) and not _is_pure(node.target):
                yield _bad_target(node)
        elif node.op == "get_attr":
            yield from _constant(facts, node)
        elif node.op not in ("placeholder", "output"):
            yield Violation(
                node, "call_function nodes", f"{node.op} of {node.target!r}", "trace through it to operators"
            )
        foreign = None
        for value in node.args:
            if type(value) is not fx.Node and foreign is None:
                foreign = _first_foreign(value)
        if node.kwargs and foreign is None:
            foreign = _first_foreign(node.kwargs)
        if foreign is not None and node.op != "placeholder":
            yield Violation(
                at=node,
                expected="nodes and literals as arguments",
                got=f"a captured {type(foreign).__module__}.{type(foreign).__qualname__}",
                remedy="make it a placeholder, or a literal such as a group's name",
            )
    yield from _writes(facts)


def _is_pure(target: Any) -> bool:
    if target is operator.getitem:
        return True
    if isinstance(target, type):
        return target in _ARITHMETIC_BUILTINS
    if not isinstance(target, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    module, name = target.__module__ or "", target.__name__
    if module in _ARITHMETIC_MODULES:
        return name not in _WRITING
    if module == "builtins":
        return target in _ARITHMETIC_BUILTINS
    if module.startswith("ep_fx.ops"):
        return target.__closure__ is None if isinstance(target, types.FunctionType) else True
    return module == "torch" and name.startswith(("sym_", "_sym_"))


def _bad_target(node: fx.Node) -> Violation:
    return Violation(
        at=node,
        expected="an operator overload, a function of ep_fx.ops, getitem or arithmetic on sizes",
        got=f"{target_name(node)} of {getattr(node.target, '__module__', None) or type(node.target).__name__}",
        remedy="trace through the function, or register it as an operator",
    )


def _constant(facts: Facts, node: fx.Node) -> Iterator[Violation]:
    if not isinstance(facts.graph.constants.get(str(node.target)), torch.Tensor):
        yield Violation(
            at=node,
            expected=f"a tensor among the graph's {len(facts.graph.constants)} constants",
            got=f"attribute {node.target!r}",
            remedy="enter it in graph.constants, or make it a placeholder",
        )


def _first_foreign(value: Any) -> Any:
    """The first thing in a nested argument that is neither node nor literal, None where all is well."""
    kind = type(value)
    if kind is fx.Node or kind in _SCALARS:
        return None
    if isinstance(value, (list, tuple)):
        return next((f for f in map(_first_foreign, value) if f is not None), None)
    if isinstance(value, dict):
        return next((f for f in map(_first_foreign, value.values()) if f is not None), None)
    if kind is slice:
        return _first_foreign((value.start, value.stop, value.step))
    return None if isinstance(value, _LITERALS) else value


def _writes(facts: Facts) -> Iterator[Violation]:
    mutable = {b.placeholder for b in facts.manifest.buffers if b.mutated}
    for node in facts.writers:
        for value in written_by(node):
            facts.checked += 1
            owners = [m[0] for m in facts.aliases.memory(value)]
            held = [o for o in owners if o.op == "get_attr" or (o.op == "placeholder" and o.target not in mutable)]
            gathered = facts.gathers.holders.get(value)
            if held or gathered:
                what = f"%{held[0].name}" if held else f"the gathered {gathered[0].name}" if gathered else ""
                yield Violation(
                    at=node,
                    expected="in-place writes to mutated buffers of the Manifest, or to the graph's own values",
                    got=f"%{node.name} writes {what}",
                    remedy="write a copy, or declare the buffer as mutated",
                )
