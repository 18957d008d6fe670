"""Fixtures for the operators: a process group of one rank, and memory that is poisoned when it is handed out."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def local_group() -> Iterator[str]:
    """Name of a gloo group that consists of this process."""
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([dist.get_rank()], backend="gloo").group_name
    if own:
        dist.destroy_process_group()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN (or the largest integer) while the test runs."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
