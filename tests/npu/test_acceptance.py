"""Unmodified models of transformers train on an npu mesh (fsdp 2, ep 2) as they do whole on the CPU.

The NPU is the one of `ep_fx.testing.npu`: the kernels' reference semantics and argument checks on 4 processes.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep_fx.testing.ranks import RankPool
from tests.npu.measure import STEPS, Findings, measure

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
ROUNDING_OF_ADAMW = 2e-5
"""In fp32: AdamW divides by the root of the squared gradient, so that rounding of a small gradient grows."""
SPREAD, ONE_SIDE = "spread", "one_side"

pytestmark = pytest.mark.timeout(300)
Measured = Callable[[str, torch.dtype], list[Findings]]


def _runs(*architectures: str, dtype: torch.dtype, slow: bool) -> list[object]:
    marks = [pytest.mark.slow] if slow else []
    return [pytest.param(arch, dtype, marks=marks, id=f"{arch}-{str(dtype)[6:]}") for arch in architectures]


FLOAT32 = [
    *_runs("mixtral", dtype=torch.float32, slow=False),
    *_runs("qwen3_moe", "deepseek_v3", dtype=torch.float32, slow=True),
]
BFLOAT16 = _runs("mixtral", "qwen3_moe", "deepseek_v3", dtype=torch.bfloat16, slow=True)


@pytest.fixture(scope="module")
def measured(npu_ranks: RankPool) -> Measured:
    """The findings about one architecture and dtype, by rank, measured once."""
    known: dict[tuple[str, torch.dtype], list[Findings]] = {}

    def find(arch: str, dtype: torch.dtype) -> list[Findings]:
        if (arch, dtype) not in known:
            known[arch, dtype] = npu_ranks.run(measure, arch, dtype, timeout=280)
        return known[arch, dtype]

    return find


def _assert_close(measured: Measured, arch: str, dtype: torch.dtype, what: str) -> None:
    for findings in measured(arch, dtype):
        assert findings.tokens[what] <= TOLERANCE[dtype]
        wrong = {name: error for name, error in findings.gradients[what].items() if not error <= TOLERANCE[dtype]}
        assert wrong == {}


@pytest.mark.parametrize(("arch", "dtype"), FLOAT32)
def test_every_token_and_every_gradient_is_the_models(measured: Measured, arch: str, dtype: torch.dtype) -> None:
    """In fp32 only: in bf16 a token may be routed otherwise, which is no rounding of a number."""
    _assert_close(measured, arch, dtype, SPREAD)


@pytest.mark.parametrize(("arch", "dtype"), [*FLOAT32, *BFLOAT16])
def test_kernels_run_as_often_as_the_graph_says(measured: Measured, arch: str, dtype: torch.dtype) -> None:
    """And what runs beside them is no operator that torch_npu leaves to the CPU: `measure` forbids these."""
    for findings in measured(arch, dtype):
        assert findings.kernels
        assert findings.kernels == findings.nodes


@pytest.mark.parametrize(("arch", "dtype"), [*FLOAT32, *BFLOAT16])
def test_half_of_the_ranks_get_no_rows(measured: Measured, arch: str, dtype: torch.dtype) -> None:
    """R04 on the device: every token of every rank goes to the same two experts, both of one ep rank."""
    for findings in measured(arch, dtype):
        assert findings.used
        for used in findings.used.values():
            assert len(used) == 2
            assert len({expert // 4 for expert in used}) == 1
    _assert_close(measured, arch, dtype, ONE_SIDE)


@pytest.mark.parametrize(("arch", "dtype"), [*FLOAT32, *BFLOAT16])
def test_training_with_adamw(measured: Measured, arch: str, dtype: torch.dtype) -> None:
    for findings in measured(arch, dtype):
        assert len(findings.losses) == STEPS
        assert max(findings.losses) <= TOLERANCE[dtype]
        limit = ROUNDING_OF_ADAMW if dtype is torch.float32 else TOLERANCE[dtype]
        assert {name: error for name, error in findings.parameters.items() if not error <= limit} == {}
