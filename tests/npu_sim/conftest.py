"""Skips where the lane's environment is not there; simulated kernels for the tests that run in this process."""
from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.npu_sim.__main__ import REASON

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.npu_sim)


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Simulated kernels in this process."""
    if find_spec("torch_npu") is None:
        pytest.skip(os.environ.get(REASON, "the real torch_npu runs in an environment of its own: make test-npu-sim"))
    from ep_fx.testing.npu.cann.simulate import install

    assert install() > 1000
