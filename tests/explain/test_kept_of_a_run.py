"""What explain says is kept for backward is what one run keeps, value by value."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import ep_fx
from ep_fx.testing import RankPools
from ep_fx.testing.ranks import local_mesh
from tests.models.hf import hf_ids, tiny_hf


def _held(output: torch.Tensor) -> list[Any]:
    """The values that the autograd node of a call holds."""
    node = output.grad_fn
    while node is not None and not hasattr(node, "saved"):
        node = node.next_functions[0][0]
    assert node is not None
    return list(node.saved)


def _kept(rank: int, arch: str) -> list[tuple[str, int, int]]:
    """Of each kept value its name, the bytes explained, and the bytes of the memory that it is the first to hold."""
    module = ep_fx.transform(tiny_hf(arch), local_mesh(fsdp=1, ep=1))
    output = module(input_ids=hf_ids(rank, 4, 7)).logits
    parameters = {p.to_local().untyped_storage().data_ptr() for p in module.parameters()}  # type: ignore[attr-defined]
    rows, seen = [], set(parameters)
    for row, value in zip(ep_fx.explain(module, sizes={"s0": 4, "s1": 7}).saved, _held(output), strict=True):
        storage = value.untyped_storage() if isinstance(value, torch.Tensor) else None
        new = storage is not None and storage.data_ptr() not in seen
        rows.append((f"{row.node} {row.type}", row.kept, storage.nbytes() if storage is not None and new else 0))
        seen.update([storage.data_ptr()] if storage is not None else [])
    return rows


@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3"])
def test_each_kept_value_has_the_bytes_that_explain_says(ranks: RankPools, arch: str) -> None:
    (rows,) = ranks(1).run(_kept, arch)
    assert sum(real for _, _, real in rows) > 100_000
    assert [row for row in rows if row[1] != row[2]] == []
