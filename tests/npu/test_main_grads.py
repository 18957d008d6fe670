"""Experts' weights in bf16 whose gradients are computed, reduced and added up in fp32."""
from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx import NpuOptions
from ep_fx.targets.npu.lowering import kept_reason
from ep_fx.testing.fake import fake_mesh
from ep_fx.testing.npu import recorded
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.cases.hand import M4
from tests.npu.lowered import calls
from tests.npu.test_fused_exchange import layer, loss_of, tokens

WIDE, PLAIN = NpuOptions(main_grads_fp32=True), NpuOptions()
EXPERTS = ("experts.w1", "experts.w2", "experts.w3")


class Run(NamedTuple):
    """Local gradients after one micro-batch and after two, and the calls of the kernel."""

    first: dict[str, Tensor]
    both: dict[str, Tensor]
    kernels: int


def _run(rank: int, target: NpuOptions) -> Run:
    module = ep_fx.transform(layer().bfloat16(), local_mesh(**M4), target=target)
    x = tokens("unbalanced", rank).bfloat16().to("npu").requires_grad_()

    def gradients() -> dict[str, Tensor]:
        return {n: p.grad.full_tensor().cpu().clone() for n, p in module.named_parameters()}  # type: ignore[union-attr]

    with recorded() as kernels:
        loss_of(module(x)).backward()
        first = gradients()
        loss_of(module(x)).backward()
    return Run(first, gradients(), kernels["npu::npu_grouped_matmul_add_"])


def test_gradients_of_experts_are_fp32_and_stay_so(ranks: RankPools) -> None:
    wide, plain = (ranks(4, "npu").run(_run, target) for target in (WIDE, PLAIN))
    for one, other in zip(wide, plain, strict=True):
        assert one.kernels == 4  # gate and up as one product, and down, for two micro-batches
        assert other.kernels == 0
        for name, gradient in one.first.items():
            rounded = other.first[name]
            if name not in EXPERTS:
                assert gradient.dtype is torch.bfloat16
                assert torch.equal(gradient, rounded)
                continue
            assert gradient.dtype is torch.float32
            assert rounded.dtype is torch.bfloat16
            error = (gradient - rounded.float()).norm() / gradient.norm()
            assert 0 < error <= 2**-7  # what bf16 rounds away, in the product and in the reduction
            assert torch.equal(one.both[name], 2 * gradient)  # and nothing is rounded where they are added up


def _lowered(model: torch.nn.Module, target: NpuOptions, **sizes: int) -> ep_fx.EPModule:
    weight = next(model.parameters())
    x = torch.zeros(12, weight.shape[-1], dtype=weight.dtype, requires_grad=True)
    with fake_mesh(**sizes) as mesh:
        return ep_fx.transform(model, mesh, example_inputs=(x,), target=target)


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "ep": 2}, {"ep": 2}, {"fsdp": 3, "ep": 2}], ids=str)
def test_every_value_up_to_the_output_is_recorded_as_fp32(sizes: dict[str, int]) -> None:
    """Uneven cuts too."""
    module = _lowered(layer().bfloat16(), WIDE, **sizes)
    gradients = module.lowered.output.args[0][1]  # type: ignore[index]
    specs = module.lowered.manifest.trainable
    dtypes = {s.name: g.meta["val"].dtype for s, g in zip(specs, gradients, strict=True)}  # type: ignore[union-attr, arg-type]
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == set(EXPERTS)
    assert {n: p.grad_dtype for n, p in module.named_parameters()} == dtypes
    assert calls(module.lowered)["npu_grouped_matmul_add_"] == 2


def test_weights_in_fp32_have_such_gradients_anyway() -> None:
    lowered = _lowered(layer(), WIDE, ep=2).lowered
    assert not calls(lowered)["npu_grouped_matmul_add_"]
    reasons = {reason for node in lowered if (reason := kept_reason(node)) is not None and "main_grads" in reason}
    assert reasons == {"main_grads: its weights are in torch.float32"}


def test_both_options_go_together() -> None:
    options = NpuOptions(soc="A3", fused_exchange=True, main_grads_fp32=True)
    found = calls(_lowered(layer().bfloat16(), options, ep=8).lowered)
    assert found["npu_grouped_matmul_add_"] == 2
    assert found["npu_alltoallv_gmm"] == 2
    assert not found["npu_grouped_matmul"]
