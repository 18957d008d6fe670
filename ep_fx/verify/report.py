"""What the rules found: a table with one line a rule, and for each violation the nodes around its culprit."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, info_of, target_name
from ep_fx.verify.rule import Rule, Violation

_SHOWN = 5
"""Violations of one rule that an error shows in full."""


class VerificationError(Exception):
    """A graph breaks rules.

    Args:
        report: all that was found.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(report.explain())


@dataclass(frozen=True)
class RuleResult:
    """One line of the report.

    Args:
        rule: the rule.
        violations: where it is broken.
        checked: number of facts it looked at.
        seconds: CPU time; facts that several rules share count for the first.
    """

    rule: Rule
    violations: tuple[Violation, ...]
    checked: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """The result of `verify`; its text is the table."""

    graph: ParallelGraph
    results: tuple[RuleResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.broken

    @property
    def broken(self) -> tuple[str, ...]:
        """Ids of the broken rules."""
        return tuple(r.rule.id for r in self.results if r.violations)

    @property
    def seconds(self) -> float:
        """CPU time of all rules."""
        return sum(r.seconds for r in self.results)

    def of(self, rule_id: str) -> RuleResult:
        """The result of one rule.

        Raises:
            KeyError: the rule did not run.
        """
        for result in self.results:
            if result.rule.id == rule_id:
                return result
        raise KeyError(f"rule {rule_id!r} did not run; those that did: {[r.rule.id for r in self.results]}")

    def raise_if_broken(self) -> Report:
        """Returns the report itself.

        Raises:
            VerificationError: a rule is broken.
        """
        if not self.ok:
            raise VerificationError(self)
        return self

    def __str__(self) -> str:
        width = max((len(r.rule.id) for r in self.results), default=0)
        lines = []
        for r in self.results:
            verdict = f"{len(r.violations)} broken" if r.violations else "ok"
            numbers = f"{r.checked:>7} checked {r.seconds * 1e3:>8.2f} ms"
            lines.append(f"{r.rule.id:<{width}}  {verdict:<9} {numbers}  {r.rule.sentence}")
        return "\n".join(lines)

    def explain(self) -> str:
        """All violations, each with the nodes around it."""
        nodes = list(self.graph)
        parts = []
        for result in self.results:
            parts += [describe(result.rule, v, nodes) for v in result.violations[:_SHOWN]]
            if len(result.violations) > _SHOWN:
                parts.append(f"rule {result.rule.id}: {len(result.violations) - _SHOWN} more violations")
        return "\n\n".join(parts) or "no rule is broken"


def describe(rule: Rule, violation: Violation, nodes: Sequence[fx.Node]) -> str:
    """A violation as a reader wants it: what, where, and the five nodes around."""
    info = info_of(violation.at)
    where = [f"module {info.fqn!r}"] if info.fqn is not None else []
    where += [info.source] if info.source is not None else []
    lines = [
        f"rule {rule.id}: {rule.sentence}",
        f"  at        %{violation.at.name}" + (f" ({', '.join(where)})" if where else ""),
        f"  expected  {violation.expected}",
        f"  got       {violation.got}",
        f"  remedy    {violation.remedy}",
    ]
    return "\n".join([*lines, *_around(violation.at, nodes)])


def _around(culprit: fx.Node, nodes: Sequence[fx.Node]) -> list[str]:
    if culprit not in nodes:
        return [f"  > {node_text(culprit)}"]
    middle = nodes.index(culprit)
    first = max(0, min(middle - 2, len(nodes) - 5))
    return [f"  {'>' if node is culprit else ' '} {node_text(node)}" for node in nodes[first : first + 5]]


def node_text(node: fx.Node) -> str:
    """``%name = target(arguments)``; works on broken graphs too."""
    if node.op == "placeholder":
        return f"%{node.name} = placeholder"
    arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    target = target_name(node).replace("::", ".") if node.op == "call_function" else f"{node.op}[{node.target}]"
    return f"%{node.name} = {target}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        shown = [_text(v) for v in value[:8]] + (["..."] if len(value) > 8 else [])
        return f"[{', '.join(shown)}]" if isinstance(value, list) else f"({', '.join(shown)})"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)
