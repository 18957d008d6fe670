"""R14 and API-6 on two NPUs: exact collectives through HCCL, and three models that train as one CPU does."""
from __future__ import annotations

import pytest
import torch

from ep_fx.testing import RankPools
from tests.npu_sim.collectives import CASES, RANKS, run
from tests.npu_sim.models import STEPS, measure

ARCHITECTURES = ("mixtral", "qwen3_moe", "deepseek_v3")
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
LIMIT = 500.0
TOLERANCE = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (2e-2, 5e-2)}
"""Of outputs and of gradients, relative, against float32 on the CPU."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_collective_gives_exact_rows(ranks: RankPools, case: str, dtype: torch.dtype) -> None:
    ranks(RANKS).run(run, case, dtype, timeout=LIMIT)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", ["fsdp", "ep"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_model_trains_as_on_one_cpu(ranks: RankPools, arch: str, dim: str, dtype: torch.dtype) -> None:
    outputs, gradients = TOLERANCE[dtype]
    for findings in ranks(RANKS).run(measure, arch, ((dim, RANKS),), dtype, dtype is torch.float32, timeout=LIMIT):
        assert findings.output <= outputs
        assert {name: error for name, error in findings.gradients.items() if not error <= gradients} == {}
        assert len(findings.losses) == (STEPS if dtype is torch.float32 else 0)
        assert all(loss <= outputs for loss in findings.losses), findings.losses
