"""Every way to place a valid step is valid under every rule: a rule that cries wolf gets switched off."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ep_fx.verify import RULES, verify
from tests.verify.builder import TOKENS, Step

VARIANTS: list[dict[str, Any]] = [
    {}, {"policy": "early"}, {"ep": 1}, {"fsdp": 1}, {"fsdp": 1, "ep": 1}, {"replicate": 2}, {"rows": 6},
    {"keep": True}, {"keep": True, "rows": 6, "policy": "early", "replicate": 2},
    {"frozen": ("first.weight", "block.experts.w1")}, {"backward": False}, {"backward": False, "ep": 1},
    {"sharded": False}, {"sharded": False, "lowered": False}, {"sharded": False, "ep": 1, "fsdp": 1},
    {"fsdp": 1, "ep": 1, "replicate": 2}, {"grad_reduce": "sum"}, {"fsdp": 4, "ep": 4, "rows": 3},
    {"local": True}, {"local": True, "replicate": 2, "policy": "early"},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_valid_step(options: dict[str, Any]) -> None:
    step = Step(**options)
    step.fx.lint()
    report = verify(step.graph)
    assert report.ok, report.explain()
    assert [r.rule.id for r in report.results] == [name for name, rule in RULES.items() if not rule.optional]


def test_every_rule_looked_at_something() -> None:
    report = verify(Step(rows=6, replicate=2).graph)
    assert all(result.checked > 0 for result in report.results), str(report)


def test_tokens_may_travel_over_the_group_of_ep() -> None:
    step = Step()
    for node in step.fx.nodes:
        node.args = tuple("ep" if a == TOKENS else a for a in node.args)
    step.graph.manifest = replace(step.graph.manifest, mesh=replace(step.mesh, exchange=""))
    assert verify(step.graph).ok


def test_copy_of_a_valid_graph_is_valid() -> None:
    assert verify(Step().graph.copy()).ok
