"""The table: every rule has a negative test, reads graphs only, and costs little."""
from __future__ import annotations

import inspect
import time

import pytest

from ep_fx.graph import info, set_info
from ep_fx.verify import RULES, Facts, verify
from tests.verify import (
    test_computation,
    test_effects,
    test_ep_order,
    test_gradients,
    test_live,
    test_order,
    test_pair,
    test_partial,
    test_peak,
    test_state,
    test_waits,
)
from tests.verify.breaking import Breaks
from tests.verify.builder import Step

MODULES = (
    test_computation, test_effects, test_ep_order, test_gradients, test_live, test_order, test_pair, test_partial,
    test_peak, test_state, test_waits,
)
TABLES = [value for module in MODULES for _, value in inspect.getmembers(module, lambda v: isinstance(v, Breaks))]
BROKEN = {case.rule for table in TABLES for case in table.cases}


@pytest.mark.parametrize("name", [r.id for r in RULES.values() if not r.optional])
def test_rule_has_a_negative_test(name: str) -> None:
    assert name in BROKEN


def test_ids_and_sentences() -> None:
    assert all(rule.id == name and rule.sentence for name, rule in RULES.items())
    assert len({rule.sentence for rule in RULES.values()}) == len(RULES)


def test_labels_are_no_evidence() -> None:
    """Only the order of phase labels is looked at, because the graph is split by it; names and paths never."""
    step = Step()
    for index, node in enumerate(step.fx.nodes):
        set_info(node, info.NodeInfo(info.info_of(node).phase, "somewhere.else", "nowhere.py:1"))
        if node.op == "call_function":
            node._rename(f"n{index}")
    assert verify(step.graph).ok


def test_structural_rules_take_about_ten_microseconds_a_node() -> None:
    graph = Step(rows=6, replicate=2).graph
    verify(graph)
    started = time.process_time()
    for _ in range(5):
        verify(graph)
    per_node = (time.process_time() - started) / 5 / len(list(graph))
    assert per_node < 100e-6, f"{per_node * 1e6:.1f} microseconds a node; tiny graphs cost about 25"


def test_facts_are_computed_once() -> None:
    facts = Facts(Step().graph)
    assert facts.aliases is facts.aliases
    assert facts.regions is facts.regions
