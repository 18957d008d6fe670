"""The benchmarks run, compare like with like, and report what they measured."""
from __future__ import annotations

import pytest

from benchmarks import capture_time, step_time
from benchmarks.step_time import Sample
from ep_fx.testing.ranks import RankPools


def test_the_report_takes_the_slowest_ranks_wall_and_the_mean_of_cpu() -> None:
    ranks = [
        {"eager": [Sample(2.0, 1.0, 5.0)], "ep_fx": [Sample(1.0, 0.5, 5.0)]},
        {"eager": [Sample(1.0, 3.0, 5.0)], "ep_fx": [Sample(3.0, 0.5, 4.5)]},
    ]
    lines = step_time.report(ranks).splitlines()
    median = {line[:24].strip(): float(line.split()[-2]) for line in lines[1:7]}
    assert median == {
        "eager wall s": 2.0, "eager cpu s": 2.0, "ep_fx wall s": 3.0, "ep_fx cpu s": 0.5, "ratio wall": 1.5,
        "ratio cpu": 0.25,
    }
    assert lines[-1].endswith("5.0e-01")


@pytest.mark.parametrize(("seconds", "verdict"), [([2.5, 1.0], "within"), ([4.5, 1.0], "OVER")])
def test_the_capture_report_says_whether_the_budget_holds(seconds: list[float], verdict: str) -> None:
    assert f"({verdict} the budget" in capture_time.report(seconds)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_models_of_the_comparison_train_alike(ranks: RankPools) -> None:
    for samples in ranks(4).run(step_time.measure, 2, None, timeout=280):
        for ours, theirs in zip(samples["ep_fx"], samples["eager"], strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
