"""Skips where there are no NPUs, with the reason; fp32 products are not shortened."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ep_fx.targets.npu.machine import require_npu, state
from tests.npu_sim.device import simulated

FOLDER = Path(__file__).parent
NEEDED = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.npu_hardware)
            item.add_marker(pytest.mark.timeout(600))  # the first call of a kernel may compile it


@pytest.fixture(scope="session", autouse=True)
def hardware() -> None:
    """Two NPUs."""
    reason = _reason()
    if reason is not None:
        pytest.skip(reason)


def _reason() -> str | None:
    if simulated():
        return "stand-ins for CANN are no NPU"
    try:
        require_npu()
    except RuntimeError as error:
        return str(error)
    found = state()
    if found.device != "torch_npu":
        return f"the device npu of this process is made by {found.device}"
    if (found.devices or 0) < NEEDED:
        return f"{NEEDED} NPUs are needed, {found.devices} found (torch_npu {found.torch_npu}, CANN {found.cann})"
    torch.npu.matmul.allow_hf32 = False
    return None
