"""torchtitan's MoE block trains as it does in one process: outputs, all gradients, and its buffers of counts."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.models.tiny_moe import next_token_loss, token_ids
from tests.models.titan import HAS_TITAN, TitanModel
from tests.oracle import assert_all_gradients_close, gradients_of, relative_error

pytestmark = pytest.mark.skipif(not HAS_TITAN, reason="torchtitan is not installed; `make env` does it")
ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "softmax, normalised, two groups": {
        "score_func": "softmax", "route_norm": True, "num_expert_groups": 2, "num_limited_groups": 1,
    },
}  # fmt: skip


class Run(NamedTuple):
    """What one rank found, against the eager model."""

    output: float
    counts: tuple[list[float], list[float]]
    names: tuple[list[str], list[str]]
    captures: int


def _run(rank: int, router: dict[str, Any], in_fp32: bool, tol: float) -> Run:
    """Two micro-batches in flight; `in_fp32` takes out torchtitan's casts of everything to bf16."""
    cast = (lambda x: x) if in_fp32 else Tensor.bfloat16
    with mock.patch.object(Tensor, "bfloat16", cast):
        module, eager = ep_fx.transform(TitanModel(**router), local_mesh(fsdp=2, ep=2)), TitanModel(**router)
        batches = [[token_ids(r + 4 * n, length=8 + n) for r in range(4)] for n in range(2)]
        outputs = [module(batch[rank]) for batch in batches]
        for y, batch in zip(outputs, batches, strict=True):
            next_token_loss(y, batch[rank]).backward()
        own = TitanModel(**router)
        want = [own(batch[rank]) for batch in batches]
        for batch in batches:
            for ids in batch:
                (next_token_loss(eager(ids), ids) / 4).backward()
    got = {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]
    assert_all_gradients_close(got, gradients_of(eager), tol)
    counts = (dict(module.named_buffers()), dict(own.named_buffers()))
    return Run(
        max(relative_error(a, b) for a, b in zip(outputs, want, strict=True)),
        tuple(c["moe.tokens_per_expert_E"].tolist() for c in counts),  # type: ignore[arg-type]
        ([n for n, _ in module.named_parameters()], [n for n, _ in eager.named_parameters()]),
        len(module.programs),
    )


@pytest.mark.parametrize("router", ROUTERS)
def test_torchtitan_equals_the_oracle(ranks: RankPools, router: str) -> None:
    for run in ranks(4).run(_run, ROUTERS[router], True, 1e-5):
        assert run.output < 1e-5
        assert run.counts[0] == run.counts[1]
        assert sum(run.counts[0]) == 2 * (2 * 8 + 2 * 9)
        assert run.names[0] == run.names[1]
        assert run.captures == 1


@pytest.mark.slow
def test_torchtitan_in_its_own_bf16_equals_the_oracle_to_rounding(ranks: RankPools) -> None:
    for run in ranks(4).run(_run, {}, False, 2e-2):
        assert run.output < 1e-2


class _Own:
    """A dispatcher whose meaning nobody knows."""

    def dispatch(self) -> None: ...

    def combine(self) -> None: ...


def _refused(rank: int) -> str:
    model = TitanModel()
    model.moe.routed_experts.token_dispatcher = _Own()
    try:
        ep_fx.transform(model, local_mesh(fsdp=2, ep=2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_dispatcher_of_unknown_meaning_is_refused(ranks: RankPools) -> None:
    for text in ranks(4).run(_refused):
        assert "RoutedExperts (" in text
        assert "test_torchtitan._Own" in text
        assert "LocalTokenDispatcher" in text


def test_the_model_keeps_its_dispatcher() -> None:
    model = TitanModel()
    before = model.moe.routed_experts.token_dispatcher
    from ep_fx.capture.experts import find_experts, install

    with install(find_experts(model, None, {})):
        assert model.moe.routed_experts.token_dispatcher is not before
    assert model.moe.routed_experts.token_dispatcher is before
    assert torch.is_grad_enabled()
