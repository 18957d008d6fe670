"""Models whose rotary embedding is a product of complex numbers: every gradient on the device, mesh (ep 2)."""
from __future__ import annotations

import pytest

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.hf.measure import averaged_gradients
from tests.models.architectures import build
from tests.models.families import row
from tests.models.hf import hf_ids
from tests.npu.measure import _host, _loss
from tests.oracle import relative_error

TOLERANCE = 1e-5


def _errors(rank: int, arch: str) -> dict[str, float]:
    """Relative error of each gradient against the model whole on the CPU."""
    whole = build(row(arch))
    module = ep_fx.transform(build(row(arch)), local_mesh(ep=2))
    ids = hf_ids(rank, 2, 8 + rank)
    _loss(module(input_ids=ids.to("npu")).logits, ids.to("npu")).backward()
    _loss(whole(input_ids=ids).logits, ids).backward()
    expected = averaged_gradients(whole)
    return {name: relative_error(_host(p.grad), expected[name]) for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ["llama4", "deepseek_v2"])
def test_gradients_behind_a_conjugate(ep_rank_pools: RankPools, arch: str) -> None:
    for errors in ep_rank_pools(2, "npu").run(_errors, arch, timeout=280):
        assert len(errors) > 10
        assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
