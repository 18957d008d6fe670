"""Unmodified models of transformers train on (fsdp 2, ep 2) as they do in one process, however they are called."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from ep_fx.testing.ranks import RankPools
from tests.hf.cases import CASES
from tests.hf.measure import STEPS, Findings, measure

ARCHITECTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe")
TOLERANCE = 1e-5
MAIN = ("ids_only", "everything")
REST = tuple(case for case in CASES if case not in MAIN)

# Four ranks capture five structures of four architectures here: outside Mixtral only two of them in the default suite.
PAIRS = [
    pytest.param(arch, case, marks=pytest.mark.slow if arch != "mixtral" and case in REST else ())
    for arch in ARCHITECTURES
    for case in CASES
]
pytestmark = pytest.mark.timeout(300)
Measured = Callable[[str, str], list[Findings]]


@pytest.fixture(scope="module")
def measured(ranks: RankPools) -> Measured:
    """The findings about one architecture and case, by rank; cases are measured in two goes."""
    known: dict[tuple[str, bool], list[Findings]] = {}

    def find(arch: str, case: str) -> list[Findings]:
        main = case in MAIN
        if (arch, main) not in known:
            known[arch, main] = ranks(4).run(measure, arch, MAIN if main else REST, main, timeout=280)
        return known[arch, main]

    return find


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_parameter_names_are_the_models(measured: Measured, arch: str) -> None:
    for findings in measured(arch, MAIN[0]):
        assert findings.names[0] == findings.names[1]


@pytest.mark.parametrize(("arch", "case"), PAIRS)
def test_one_capture_serves_two_shapes(measured: Measured, arch: str, case: str) -> None:
    assert [findings.captures[case] for findings in measured(arch, case)] == [1] * 4


@pytest.mark.parametrize(("arch", "case"), PAIRS)
def test_the_output_has_the_models_class_and_every_field_is_right(measured: Measured, arch: str, case: str) -> None:
    for findings in measured(arch, case):
        assert findings.classes[case][0] == findings.classes[case][1]
        assert findings.fields[case][0] == findings.fields[case][1]
        wrong = {name: error for name, error in findings.outputs[case].items() if not error <= TOLERANCE}
        assert wrong == {}


@pytest.mark.parametrize(("arch", "case"), PAIRS)
def test_every_gradient_is_the_mean_over_ranks(measured: Measured, arch: str, case: str) -> None:
    for findings in measured(arch, case):
        wrong = {name: error for name, error in findings.gradients[case].items() if not error <= TOLERANCE}
        assert wrong == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_training_with_interleaved_micro_batches_follows_one_process(measured: Measured, arch: str) -> None:
    for findings in measured(arch, MAIN[0]):
        assert len(findings.losses) == STEPS
        assert max(findings.losses) <= TOLERANCE, findings.losses
        assert max(findings.norms) <= TOLERANCE, findings.norms
