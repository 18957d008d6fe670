"""Rule `target`: every kernel of a lowered graph gets what torch_npu demands, and every row belongs to a group.

The sizes of the groups of a product are values of the device. That they add up to the rows is shown by where both come
from: the counts of a context and as many rows as its exchange brought, or counts that were completed with the rest.
"""
from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ep_fx import ops
from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.checked import checked, recorded
from ep_fx.targets.npu.kernels import KERNELS
from ep_fx.targets.npu.kernels.context import dispatch_context
from ep_fx.targets.npu.kernels.exchange import exchange_context, npu_alltoallv_gmm
from ep_fx.targets.npu.kernels.matmul import rest_counted
from ep_fx.targets.npu.places import on_device
from ep_fx.targets.npu.preconditions import Checked, Finding
from ep_fx.targets.npu.preconditions.grouped import TOTAL
from ep_fx.targets.npu.rows import rows
from ep_fx.targets.npu.types import kernel_types
from ep_fx.verify import RULES, Facts, Report, Rule, Violation, rule, run_rule

_FUNCTIONS = frozenset(map(id, KERNELS.values()))
_COUNTS: dict[Any, int] = {
    dispatch_context: 4, ops.dispatch_context: 4, torch.ops.ep_fx.dispatch.default: 2, exchange_context: 4,
}  # fmt: skip
"""Place of the counts in what hands out rows; in place 0 stands something with as many rows as were handed out, but in
the last, whose rows only the kernels have that exchange them."""
KEPT = ("order", "live", "ep-order", "reduce-once", "divisor", "saved", "wait")
"""Rules of the verifier that a lowering keeps: they speak of memory, collectives and gradients. The others read the
dialect's own operators, which are replaced, or where an exchange stands; they run on the graph before."""
aten = torch.ops.aten
_SAME = frozenset({aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default})


def target(soc: str | None) -> Rule:
    """The rule for a chip."""

    @rule("target", "every kernel of the target gets what torch_npu demands of its arguments")
    def check(facts: Facts) -> Iterator[Violation]:
        for node in facts.nodes:
            if id(node.target) in _FUNCTIONS:
                facts.checked += 1
                yield from _check(node, soc)

    return check


def check_target(graph: ParallelGraph, soc: str | None = None) -> Report:
    """Holds a lowered graph against this rule, the others of the target, and those of all graphs that hold for it too.

    Args:
        soc: the chip, ``"A2"`` or ``"A3"``; None: not known, and what depends on it is left to the run.

    Returns:
        The report; its `raise_if_broken` names node, module and line of the source.
    """
    facts = Facts(graph)
    rules = (target(soc), kernel_types, rows, on_device, *(RULES[name] for name in KEPT))
    return Report(graph, tuple(run_rule(each, facts) for each in rules))


def run_time_conditions(graph: ParallelGraph) -> dict[fx.Node, tuple[Finding, ...]]:
    """For each kernel node the conditions that depend on sizes which only a run knows, but for those that hold by the
    structure of the graph."""
    found = {}
    for node in graph:
        if id(node.target) in _FUNCTIONS and (open_ := _checked(node).at_run_time):
            found[node] = tuple(f for f in open_ if f.condition.wants != TOTAL)
    return {node: findings for node, findings in found.items() if findings}


def _checked(node: fx.Node, soc: str | None = None) -> Checked:
    assert callable(node.target)
    return checked(node.target, node.args, node.kwargs, result=node if "val" in node.meta else None, soc=soc)


def _check(node: fx.Node, soc: str | None) -> Iterator[Violation]:
    missing = [n.name for n in pytree.tree_leaves((node.args, node.kwargs)) if _is_unrecorded(n)]
    if missing:
        yield Violation(
            node, "arguments with recorded values", f"%{', %'.join(missing)} without", "record what the nodes give"
        )
        return
    try:
        found = _checked(node, soc)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        first = str(error).strip().split("\n")[0]
        yield Violation(node, "arguments that the kernel accepts", first, "make their types and shapes fit")
        return
    for finding in found.broken:
        expected = f"{finding.op}, {finding.expected} ({finding.condition.source})"
        yield Violation(node, expected, finding.got, finding.remedy)
    if any(finding.condition.wants == TOTAL for finding in found.at_run_time) and not covers_all(node):
        yield Violation(
            node, "counts that add up to the rows: both of one context, or counts completed with the rest",
            f"%{getattr(node.args[2], 'name', node.args[2])} and rows of which that is not known",
            "pass rest_counted(counts, rows) and weights with a group of zeros, or leave it to the fallback",
        )  # fmt: skip


def _is_unrecorded(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.meta.get("val") is None


def covers_all(product: fx.Node) -> bool:
    """Whether the groups of a grouped product are known to be all of its rows."""
    x, counts = product.args[0], product.args[2]
    if not isinstance(x, fx.Node) or not isinstance(counts, fx.Node):
        return False
    group_type = product.args[4] if len(product.args) > 4 else product.kwargs.get("group_type", 0)
    total = _size(x, 1 if group_type == 2 else 0)
    while counts.target in _SAME and isinstance(counts.args[0], fx.Node):
        counts = counts.args[0]
    source = counts.args[0] if counts.args else None
    if counts.target is rest_counted:
        completed = counts.args[1]
        return isinstance(completed, fx.Node) and _size(completed, 0) == total
    if counts.target is not operator.getitem or not isinstance(source, fx.Node):
        return False
    if counts.args[1] != _COUNTS.get(source.target):
        return False
    if source.target is exchange_context:
        return any(_size(received, 0) == total for received in _received(source))
    return any(_size(user, 0) == total for user in source.users if user.args[1:] == (0,))


def _received(context: fx.Node) -> Iterator[fx.Node]:
    """What the kernels that exchange by themselves give for the rows that a context counts."""
    counts = [user for user in context.users if user.args[1:] == (1,)]
    for fused in (user for node in counts for user in node.users if user.target is npu_alltoallv_gmm):
        if fused.args[3] in counts:
            yield from (user for user in fused.users if user.target is operator.getitem)


def _size(node: fx.Node, dim: int) -> Any:
    """A size as an expression: rows that only a run can count have a symbol of their own."""
    size = recorded(node).shape[dim]
    return size.node.expr if isinstance(size, torch.SymInt) else size
