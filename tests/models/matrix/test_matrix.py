"""Every family of transformers with decorated experts on 4 ranks: outputs and all gradients are those of one process.

``make models`` runs the whole and records it for docs/models.md; the default suite runs `FAST` on one mesh.
"""
from __future__ import annotations

from typing import Any

import pytest

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.models.architectures import build, inputs_of
from tests.models.families import REFUSED, ROWS, row
from tests.models.matrix.measure import measure
from tests.models.matrix.record import record

TOLERANCE = 1e-5
TWO, FOUR = "fsdp 2, ep 2", "fsdp 1, ep 4"
MESHES = {TWO: {"fsdp": 2, "ep": 2}, FOUR: {"fsdp": 1, "ep": 4}}
FAST = (
    "aria", "dots1", "gpt_oss", "lfm2_moe", "openai_privacy_filter", "qwen3_omni_moe_talker", "unlimited_ocr", "zaya",
)
"""Transposed; groups and a correction; bias and interleaving; short convolutions; no labels; embeddings as inputs; a
wrapper; a router with a state."""
ON_FOUR = (
    "aria", "deepseek_v3", "diffusion_gemma", "ernie4_5_moe", "gemma4", "gpt_oss", "muse_spark", "nemotron_h",
    "qwen3_next", "zaya",
)
PAIRS = [(architecture.name, TWO) for architecture in ROWS] + [(name, FOUR) for name in ON_FOUR]

pytestmark = [pytest.mark.models, pytest.mark.timeout(580)]


def _slow(name: str, mesh: str) -> Any:
    return () if name in FAST and mesh == TWO else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "mesh"), [pytest.param(*pair, marks=_slow(*pair), id=f"{pair[0]}-{pair[1]}") for pair in PAIRS]
)
def test_outputs_and_all_gradients_are_those_of_one_process(
    ranks: RankPools, request: pytest.FixtureRequest, name: str, mesh: str
) -> None:
    found = ranks(4).run(measure, name, MESHES[mesh], timeout=560)
    for findings in found:
        assert findings.regions == row(name).moe_layers
        assert {n: e for n, e in findings.outputs.items() if not e <= TOLERANCE} == {}
        assert {n: e for n, e in findings.gradients.items() if not e <= TOLERANCE} == {}
    if request.config.getoption("--record-models"):
        record(row(name), mesh, found)


def refusal(rank: int, name: str) -> str:
    """What the first call of the architecture says."""
    module = ep_fx.transform(build(row(name)), local_mesh(fsdp=2, ep=2))
    with pytest.raises(ValueError, match="forward branches or loops on the values of a tensor") as caught:
        module(**inputs_of(row(name), rank))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [architecture.name for architecture in REFUSED])
def test_a_forward_that_no_graph_can_carry_is_refused_by_module_and_line(
    ranks: RankPools, request: pytest.FixtureRequest, name: str
) -> None:
    for message in ranks(4).run(refusal, name, timeout=560):
        assert message.startswith(f"{row(name).refused} (")
        assert f"modeling_{row(name).family}.py:" in message
        assert "accepted forms" in message
    if request.config.getoption("--record-models"):
        record(row(name), TWO, [])
