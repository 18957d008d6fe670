"""API-6: unmodified models of transformers, emitted for the NPU, train on the real torch_npu as on one CPU."""
from __future__ import annotations

import pytest
import torch

from ep_fx.testing import RankPools
from tests.npu_sim.models import STEPS, Findings, measure

ARCHITECTURES = ("mixtral", "qwen3_moe", "deepseek_v3")
Mesh = tuple[tuple[str, int], ...]
FSDP, EP = ("fsdp", 2), ("ep", 2)
PAIRS = [*((arch, (dim,)) for arch in ARCHITECTURES for dim in (FSDP, EP)), ("mixtral", (FSDP, EP))]
pytestmark = pytest.mark.timeout(120)

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 5e-2)}
"""Of outputs and of gradients, relative. A bfloat16 has 8 bits, and the reference computes in float32."""
STEP_TOLERANCE = 1e-3
"""Of a parameter's change over the steps: AdamW divides by the size of a gradient, rounding grows where it is small.
One of the 49,152 numbers of a stack of experts that goes the other way in one step makes 3e-3."""


KERNELS = {
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad_v2",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad_v2",
}
"""Every MoE region is made of these, in forward and backward."""


def _run(ranks: RankPools, arch: str, mesh: Mesh, dtype: torch.dtype) -> list[Findings]:
    return ranks(2 ** len(mesh)).run(measure, arch, mesh, dtype, dtype is torch.float32, timeout=100)


def _above(errors: dict[str, float], tolerance: float) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error <= tolerance}


@pytest.mark.parametrize(("arch", "mesh"), PAIRS)
def test_float32_output_gradients_and_steps(ranks: RankPools, arch: str, mesh: Mesh) -> None:
    outputs, gradients = TOLERANCE[torch.float32]
    for findings in _run(ranks, arch, mesh, torch.float32):
        assert findings.kernels >= KERNELS
        assert findings.output <= outputs
        assert _above(findings.gradients, gradients) == {}
        assert len(findings.losses) == STEPS
        assert max(findings.losses) <= outputs, findings.losses
        assert _above(findings.parameters, STEP_TOLERANCE) == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_output_and_gradients(ranks: RankPools, arch: str) -> None:
    outputs, gradients = TOLERANCE[torch.bfloat16]
    for findings in _run(ranks, arch, (EP,), torch.bfloat16):
        assert findings.output <= outputs
        assert _above(findings.gradients, gradients) == {}
