"""Exchange and product as one kernel: unbalanced routing, ranks without tokens and ranks without rows, on 4 ranks.

The kernels' sizes and dtypes are those of A3, 8 ranks and half precision. Here these two conditions are taken out, so
that what is computed can be compared with one process in fp32; that they hold is tested apart.
"""
from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx import EPModule, NpuOptions
from ep_fx.targets.npu.lowering import kept_reason
from ep_fx.targets.npu.preconditions import OPS
from ep_fx.targets.npu.preconditions.build import FLOATS
from ep_fx.testing.fake import fake_mesh
from ep_fx.testing.npu import checks, recorded
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE
from tests.models.moe import MoE
from tests.models.tiny_moe import SwiGLUExperts
from tests.npu.lowered import calls
from tests.oracle import assert_all_gradients_close, oracle, relative_error

DIM, HIDDEN, EXPERTS = 16, 24, 8
FUSED = NpuOptions(soc="A3", fused_exchange=True)
NAMES = ("npu_alltoallv_gmm", "npu_gmm_alltoallv")
TOKENS = {"unbalanced": (9, 2, 17, 5), "a rank without tokens": (9, 0, 4, 1), "one rank gets all": (6, 6, 6, 6)}


class Skewed(nn.Linear):
    """Logits that prefer some experts; with `all_to` only the first two are ever chosen."""

    def __init__(self, all_to: bool) -> None:
        super().__init__(DIM, EXPERTS, bias=False)
        shift = [30.0, 30.0, *[0.0] * 6] if all_to else [2.0, 0, 0, 1.5, 0, 0, 0, -2]
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def layer(all_to: bool = False, grouped: bool = True) -> MoE:
    """The same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return MoE(Skewed(all_to), SwiGLUExperts(EXPERTS, DIM, HIDDEN, grouped=grouped), top_k=2)


def tokens(name: str, rank: int) -> Tensor:
    """``[n, 16]``."""
    return torch.randn(TOKENS[name][rank], DIM, generator=torch.Generator().manual_seed(rank))


def loss_of(y: Tensor) -> Tensor:
    """Defined for no token, too."""
    return y.square().sum()


def _without_limits(patch: pytest.MonkeyPatch) -> None:
    """Any number of ranks, and fp32."""
    for name in NAMES:
        kept = [c for c in OPS[name].conditions if c.argument != "ep_world_size" and "bfloat16" not in c.wants]
        assert len(kept) == len(OPS[name].conditions) - 2
        patch.setitem(OPS, name, OPS[name]._replace(conditions=tuple(kept)))
    patch.setattr(checks, "HALVES", FLOATS)


class Run(NamedTuple):
    """What one rank saw."""

    y: Tensor
    grad_x: Tensor
    gradients: dict[str, Tensor]
    kernels: Counter[str]
    nodes: Counter[str]


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()


def _run(rank: int, name: str, sizes: dict[str, int], target: NpuOptions) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        _without_limits(patch)
        module = ep_fx.transform(layer(name == "one rank gets all"), local_mesh(**sizes), target=target)
        x = tokens(name, rank).to("npu").requires_grad_()
        with recorded() as kernels:
            y = module(x)
            loss_of(y).backward()
        gradients = {n: _whole(p.grad) for n, p in module.named_parameters()}
    return Run(y.detach().cpu(), _whole(x.grad), gradients, kernels, calls(module.lowered))


@pytest.mark.parametrize("sizes", [M4, {"fsdp": 1, "ep": 4}], ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_outputs_and_gradients_are_those_of_one_process(ranks: RankPools, name: str, sizes: dict[str, int]) -> None:
    runs = ranks(4, "npu").run(_run, name, sizes, FUSED)
    want = oracle(lambda: layer(name == "one rank gets all"), [(tokens(name, rank),) for rank in range(4)], loss_of)
    for run, y in zip(runs, want.outputs, strict=True):
        assert relative_error(run.y, y) <= 1e-5
        assert_all_gradients_close(run.gradients, want.gradients, tol=1e-5)
        assert run.nodes["npu_alltoallv_gmm"] == run.nodes["npu_gmm_alltoallv"] == 2  # one each a direction
        assert run.nodes["npu_grouped_matmul"] == 2  # the gradients of the weights
        assert not run.nodes["npu_moe_token_permute"]
        for kernel in NAMES:
            assert run.kernels[f"npu::{kernel}"] == 2  # on every rank, with rows or without: the others wait for it


def _in_half(rank: int, sizes: dict[str, int], target: NpuOptions) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        if sizes["ep"] < 8:
            _without_limits(patch)
        module = ep_fx.transform(layer().bfloat16(), local_mesh(**sizes), target=target)
        x = tokens("unbalanced", rank % 4).bfloat16().to("npu").requires_grad_()
        y = module(x)
        loss_of(y).backward()
        gradients = {n: _whole(p.grad) for n, p in module.named_parameters()}
    return Run(y.detach().cpu(), _whole(x.grad), gradients, Counter(), calls(module.lowered))


@pytest.mark.parametrize("sizes", [M4, pytest.param({"ep": 8}, marks=pytest.mark.slow)], ids=str)
def test_in_half_precision_nothing_changes(ranks: RankPools, sizes: dict[str, int]) -> None:
    """The same rows in the same order through the same products; on 8 ranks with every condition in force."""
    pool = ranks(math.prod(sizes.values()), "npu")
    fused, apart = (pool.run(_in_half, sizes, target) for target in (FUSED, NpuOptions(soc="A3")))
    for one, other in zip(fused, apart, strict=True):
        assert one.nodes["npu_alltoallv_gmm"] == 2
        assert not other.nodes["npu_alltoallv_gmm"]
        assert torch.equal(one.y, other.y)
        assert torch.equal(one.grad_x, other.grad_x)
        for name, gradient in one.gradients.items():
            assert torch.equal(gradient, other.gradients[name]), name


# -- conditions --------------------------------------------------------------------------------------------------------
def emitted(model: nn.Module, target: NpuOptions, **sizes: int) -> EPModule:
    """`model` transformed on a fake mesh."""
    weight = next(model.parameters())
    x = torch.zeros(12, weight.shape[-1], dtype=weight.dtype, requires_grad=True)
    with fake_mesh(**sizes) as mesh:
        return ep_fx.transform(model, mesh, example_inputs=(x,), target=target)


def test_eight_ranks_of_a3_in_half_precision_are_fused() -> None:
    module = emitted(layer().bfloat16(), FUSED, ep=8)
    assert calls(module.lowered)["npu_alltoallv_gmm"] == 2
    assert calls(module.lowered)["exchange_context"] == 1
    assert not calls(module.lowered)["dispatch_context"]


@pytest.mark.parametrize(("model", "sizes", "reason"), [
    (lambda: layer().bfloat16(), {"ep": 4}, "expected ep_world_size: 8 or 16 or 32 or 64 or 128, got 4"),
    (layer, {"ep": 8}, "expected gmm_x: torch.float16 or torch.bfloat16, got torch.float32"),
    (lambda: HandMoE(8, 16, grouped=True).bfloat16(), {"ep": 8}, "is the only product between two exchanges"),
    (lambda: layer(grouped=False).bfloat16(), {"ep": 8}, "are read by 0 grouped products, not by one"),
], ids=["ranks", "half", "one product", "no grouped product"])  # fmt: skip
def test_what_the_kernels_do_not_take_stays_apart(model: Any, sizes: dict[str, int], reason: str) -> None:
    lowered = emitted(model(), FUSED, **sizes).lowered
    assert not calls(lowered)["npu_alltoallv_gmm"]
    kept = [said for node in lowered if (said := kept_reason(node)) is not None and said.startswith("fused_exchange")]
    assert len(kept) == 4  # every exchange of the region
    assert all(reason in said for said in kept), kept


def test_nothing_is_fused_unless_asked_for() -> None:
    assert not calls(emitted(layer().bfloat16(), NpuOptions(soc="A3"), ep=8).lowered)["npu_alltoallv_gmm"]


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"soc": "A5"}, ValueError, r"soc must be 'A2' or 'A3', got 'A5'"),
    ({"fused_exchange": 1}, TypeError, "fused_exchange must be True or False, got 1"),
    ({"fused_exchange": True}, ValueError, "fused_exchange needs soc='A3', got 'A2'"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        NpuOptions(**options)


def test_a_target_that_is_none_is_refused() -> None:
    with fake_mesh(ep=2) as mesh, pytest.raises(ValueError, match=r"ep_fx\.NpuOptions\(\.\.\.\) or None"):
        ep_fx.transform(layer(), mesh, target="tpu")  # type: ignore[arg-type]
