"""The verifier: a table of rules that read a graph and its Manifest, and nothing else."""
from __future__ import annotations

import time
from collections.abc import Iterable

from ep_fx.graph import ParallelGraph
from ep_fx.verify.facts import Facts
from ep_fx.verify.report import Report, RuleResult, VerificationError
from ep_fx.verify.rule import Rule, Violation, rule
from ep_fx.verify.table import RULES

__all__ = [
    "RULES", "Facts", "Report", "Rule", "RuleResult", "VerificationError", "Violation", "rule",
    "run_rule", "verify",
]


def verify(graph: ParallelGraph, rules: Iterable[str] | None = None, *, types: bool = False) -> Report:
    """Checks `graph` against the rule table and collects what is broken; changes nothing.

    Args:
        graph: any graph, before or after any pass.
        rules: ids of the rules to run; None: all structural ones.
        types: also propagate fake tensors anew and compare (rule ``types``, up to 1 ms a node).

    Raises:
        KeyError: an unknown rule.
    """
    chosen = [r.id for r in RULES.values() if not r.optional or types] if rules is None else list(rules)
    unknown = [name for name in chosen if name not in RULES]
    if unknown:
        raise KeyError(f"no rule {', '.join(map(repr, unknown))}; rules are {', '.join(RULES)}")
    facts = Facts(graph)
    return Report(graph, tuple(run_rule(RULES[name], facts) for name in chosen))


def run_rule(checked: Rule, facts: Facts) -> RuleResult:
    """Runs one rule, of this table or of a target's own."""
    facts.checked = 0
    started = time.process_time()
    violations = tuple(checked.check(facts))
    return RuleResult(checked, violations, facts.checked, time.process_time() - started)
