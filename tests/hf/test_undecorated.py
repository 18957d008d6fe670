"""The families of transformers whose experts have a form of their own: equal to eager, or refused with the reason."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.models.architectures import build, inputs_of
from tests.models.families import row

EP2: dict[str, int] = {"fsdp": 2, "ep": 2}
SPLIT: dict[str, dict[str, Any]] = {
    "llama4": {}, "dbrx": {}, "doge": {}, "step3p7": {}, "longcat_flash": {"zero_expert_num": 0}, "nllb_moe": {},
    "switch_transformers": {}, "vitpose_backbone": {},
}  # fmt: skip
REFUSED = {
    "jetmoe": "attention experts are two products",
    "longcat_flash": "gate_up_proj has 12 rows, 4 of them for experts without weights",
}
pytestmark = pytest.mark.timeout(200)


_ROUNDING = ("k_proj.bias", "key.bias")
"""Softmax takes no notice of them: their gradient is zero but for rounding."""


class Found(NamedTuple):
    """What one rank found: errors that are no rounding, whether checkpoints go both ways, the number of regions."""

    wrong: dict[str, float]
    round_trip: bool
    regions: int


def _check(rank: int, name: str, sizes: dict[str, int], overrides: dict[str, Any]) -> Found:
    mesh, kwargs = local_mesh(**sizes), inputs_of(row(name), rank)
    model = build(row(name), **overrides)
    report = ep_fx.check(model, mesh, **kwargs)
    errors = {**report.outputs, **report.gradients}
    wrong = {n: error for n, error in errors.items() if not error <= 1e-5 and not n.endswith(_ROUNDING)}
    module = ep_fx.transform(build(row(name), seed=3, **overrides), mesh)
    module.load_state_dict(model.state_dict())
    state, want = module.full_state_dict(), model.state_dict()
    equal = state.keys() == want.keys() and all(bool((state[key] == value).all()) for key, value in want.items())
    module.prepare(**kwargs)
    return Found(wrong, equal, len(module.graph.manifest.regions))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_undecorated_experts_equal_eager(ranks: RankPools, name: str) -> None:
    for found in ranks(4).run(_check, name, EP2, SPLIT[name], timeout=180):
        assert found.wrong == {}
        assert found.round_trip
        assert found.regions >= 1


def _refused(rank: int) -> dict[str, str]:
    found = {}
    for name in REFUSED:
        try:
            ep_fx.transform(build(row(name)), local_mesh(**EP2))
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_has_no_form_is_refused_with_the_reason(ranks: RankPools) -> None:
    for found in ranks(4).run(_refused):
        for name, reason in REFUSED.items():
            assert reason in found[name]
            assert "modeling_" in found[name]
            assert "layers.0." in found[name]
