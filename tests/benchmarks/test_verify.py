"""The benchmark of the rules runs, and its table says how cost grows and whether budgets hold."""

from __future__ import annotations

import pytest

from benchmarks.verify import Cost, measure, report


def test_a_small_graph_is_measured_rule_by_rule_and_pass_by_pass() -> None:
    cost = measure(300, 1)
    assert cost.nodes == 318
    assert list(cost.passes) == ["dead-code", "expert-parallel", "fsdp"]
    assert {"order", "pair", "computes"} <= cost.rules.keys()
    assert 0 < sum(cost.rules.values()) <= cost.verify
    assert 0 < cost.peak < 10_000 * cost.nodes


@pytest.mark.parametrize(("seconds", "kilobytes", "verdicts"), [
    (0.9, 4, ["9.00: within", "0.98: within", "4.00: within"]),
    (2.0, 6, ["20.00: OVER", "1.15: OVER", "6.00: OVER"]),
])  # fmt: skip
def test_the_report_says_whether_the_budgets_hold(seconds: float, kilobytes: int, verdicts: list[str]) -> None:
    small = Cost(1_000, {"fsdp": 0.01}, {"order": 0.004}, 0.01, 1_000_000)
    large = Cost(100_000, {"fsdp": 1.0}, {"order": 0.4}, seconds, kilobytes * 100_000_000)
    lines = report([small, large]).splitlines()
    assert lines[1].split() == ["order", "4.00", "4.00", "1.00"]
    assert lines[-4].split() == ["pass", "fsdp", "10.00", "10.00", "1.00"]
    for line, verdict in zip(lines[-3:], verdicts, strict=True):
        assert verdict in line
