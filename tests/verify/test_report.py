"""The report: a table with one line a rule, and errors that say what, where, and what stands around."""
from __future__ import annotations

import pytest

from ep_fx.verify import RULES, VerificationError, verify
from ep_fx.verify.report import node_text
from tests.verify.breaking import erase, replace_argument
from tests.verify.builder import Step
from tests.verify.test_live import r20_reshard_before_use_through_a_view


def test_the_error_shows_the_culprit_its_source_and_the_nodes_around() -> None:
    step = Step()
    r20_reshard_before_use_through_a_view(step)
    with pytest.raises(VerificationError) as caught:
        verify(step.graph, ["live"]).raise_if_broken()
    assert str(caught.value) == "\n".join(
        [
            "rule live: every use of an unsharded value, through any alias, lies between its unshard and its reshard",
            "  at        %h (module 'block', model.py:7)",
            "  expected  no use of first.weight after %reshard_first_forward frees it",
            "  got       %h reads it through %full_first_weight_forward -> %first_t",
            "  remedy    unshard again before this use, or move the reshard behind it",
            "    %first_t = aten.t(%full_first_weight_forward)",
            "    %reshard_first_forward = ep_fx.reshard([%full_first_weight_forward])",
            "  > %h = aten.mm(%x, %first_t)",
            "    %count_step = aten.add_(%steps, 1)",
            "    %scores = aten._softmax(%h, -1, False)",
        ]
    )


def test_the_table_has_one_line_a_rule() -> None:
    step = Step()
    erase(step["count_step"])
    lines = str(verify(step.graph)).splitlines()
    structural = [rule for rule in RULES.values() if not rule.optional]
    assert [line.split()[0] for line in lines] == [rule.id for rule in structural]
    assert all(line.endswith(rule.sentence) for line, rule in zip(lines, structural, strict=True))
    assert [line.split()[0] for line in lines if " broken " in line] == ["effects", "computes"]


def test_many_violations_are_counted_not_listed() -> None:
    step = Step()
    for name in ("h", "scores", "up", "act", "down", "y", "out"):
        step[name].target = print
    text = verify(step.graph, ["no-state"]).explain()
    assert text.count("  remedy ") == 5
    assert "rule no-state: 2 more violations" in text


def test_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no rule 'lively'; rules are order, types, pair"):
        verify(Step().graph, ["lively"])
    with pytest.raises(KeyError, match="rule 'live' did not run"):
        verify(Step().graph, ["order"]).of("live")


def test_verify_changes_nothing() -> None:
    step = Step(rows=6)
    before = [(n.name, n.args, dict(n.meta)) for n in step.fx.nodes]
    verify(step.graph)
    assert [(n.name, n.args, dict(n.meta)) for n in step.fx.nodes] == before


def test_node_text_of_long_lists_and_odd_arguments() -> None:
    step = Step()
    replace_argument(step["reshard_first_forward"], 0, [step["h"]] * 9)
    assert node_text(step["reshard_first_forward"]).endswith("%h, %h, ...])")
    assert node_text(step["x"]) == "%x = placeholder"
    assert node_text(step.graph.output).startswith("return ((%out), (")
