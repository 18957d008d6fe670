"""Which norms, rotary embeddings and attentions are found, in models and one by one, and which near misses are not."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.graph import ParallelGraph, target_name
from ep_fx.targets.npu.lowering import kept_reason
from ep_fx.testing.fake import fake_mesh
from ep_fx.testing.ranks import RankPool, local_mesh
from tests.npu.lowered import hf_for_npu
from tests.npu.test_dense import Norm, OfTorch, Pairs, Rotary

NORMS = {"mixtral": 2 * 2 + 1, "qwen3_moe": 2 * 4 + 1, "deepseek_v3": 2 * 4 + 1}
"""Norms of two layers, those of heads or latents included, and the last one."""
DENSE = ("npu_rms_norm", "npu_rotary_mul", "npu_fusion_attention")


def _counts(graph: ParallelGraph, *more: str) -> dict[str, int]:
    """How often the graph calls each kernel for dense parts, and each operator of `more`."""
    names = [target_name(node) for node in graph]
    return {name: names.count(name) for name in sorted(set(names)) if name.startswith(DENSE) or name in more}


def _lowered(model: nn.Module, fsdp: int = 2, width: int = 16) -> ParallelGraph:
    with fake_mesh(fsdp=fsdp) as mesh:
        example = (torch.ones(2, 6, width, dtype=next(model.parameters()).dtype),)
        return ep_fx.transform(model, mesh, plan={}, example_inputs=example, target="npu").lowered


def _reasons(graph: ParallelGraph) -> list[str]:
    return [reason for node in graph if (reason := kept_reason(node)) is not None]


@pytest.mark.parametrize(
    ("arch", "dtype"), [*((arch, torch.float32) for arch in NORMS), ("deepseek_v3", torch.bfloat16)], ids=str
)
def test_models_of_transformers(arch: str, dtype: torch.dtype) -> None:
    """Every one, forward and backward, with the second gather of the weights in between."""
    module = hf_for_npu(arch, dtype, fsdp=2, ep=2)
    assert _counts(module.lowered, "aten::rsqrt", "ep_fx::attention", "ep_fx::attention_backward") == {
        "npu_rms_norm": NORMS[arch], "npu_rms_norm_backward": NORMS[arch],
        "npu_rotary_mul": 4, "npu_rotary_mul_backward": 4,
        "npu_fusion_attention": 2, "npu_fusion_attention_grad": 2,
    }  # fmt: skip
    assert _counts(module.graph) == {}


def test_shards_with_padding_are_one_weight_in_both_gathers() -> None:
    assert _counts(_lowered(Norm(10), fsdp=4, width=10)) == {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}


@pytest.mark.parametrize("make", [Norm, OfTorch])
@pytest.mark.parametrize("frozen", [("weight",), ("before",), ("weight", "before")])
def test_gradients_that_are_not_asked_for(make: Callable[[], nn.Module], frozen: tuple[str, ...]) -> None:
    """The kernel reads the weight, which is freed after forward where only the weight's gradient is asked for."""
    model = make()
    model.register_parameter("last", nn.Parameter(torch.ones(16)))
    model.register_forward_hook(lambda module, args, y: y * module.last)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    backward = {"npu_rms_norm_backward": 1} if frozen == ("weight",) else {}
    counts = _counts(_lowered(model))
    assert {name: n for name, n in counts.items() if name != "npu_rms_norm"} == backward
    assert counts.get("npu_rms_norm") == (None if frozen == ("before",) else 1), counts


def _forward_only(rank: int) -> tuple[dict[str, int], float]:
    torch.manual_seed(0)
    eager, x = nn.Sequential(Norm(), Pairs(is_causal=True)), torch.randn(2, 5, 16)
    with torch.no_grad():
        want = eager(x)
        module = ep_fx.transform(eager, local_mesh(fsdp=1), plan={})
        got = module(x.to("npu"))
    return _counts(module.lowered), float((got.cpu() - want).norm() / want.norm())


def test_a_graph_without_gradients(npu_rank: RankPool) -> None:
    ((counts, error),) = npu_rank.run(_forward_only)
    assert counts == {"npu_rms_norm": 1, "npu_rotary_mul": 2, "npu_fusion_attention": 1}
    assert error < 1e-5


# -- near misses -------------------------------------------------------------------------------------------------------
class Epsilon(Norm):
    """It is a tensor."""

    def norm(self, x: Tensor) -> Tensor:
        epsilon = torch.full((), 1e-5, device=x.device)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


class Read(Norm):
    """Somebody reads what is normalised and not weighed."""

    def norm(self, x: Tensor) -> Tensor:
        normalised = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normalised + normalised


class Axis(Norm):
    """The mean is over positions."""

    def norm(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-5))


class Cube(Norm):
    """Not of squares."""

    def norm(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))


class Other(Norm):
    """The root is of another tensor."""

    def norm(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(self.before(x).pow(2).mean(-1, keepdim=True) + 1e-5))


class WideWeight(Norm):
    """The weight is of a wider dtype than what it weighs."""

    def norm(self, x: Tensor) -> Tensor:
        narrow, wide = x.bfloat16(), x.bfloat16().float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(narrow.dtype)


@pytest.mark.parametrize("make", [Epsilon, Read, Axis, Cube, Other, WideWeight])
def test_norms_that_are_not_such(make: Callable[[], nn.Module]) -> None:
    graph = _lowered(make())
    assert _counts(graph, "aten::rsqrt") == {"aten::rsqrt": 1}
    assert any(reason.startswith("rms_norm: ") for reason in _reasons(graph))


class Scaled(Rotary):
    """The angles are scaled, as YaRN does."""

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().angles(x)
        return cos * 1.25, sin * 1.25


class Learned(Rotary):
    """The angles have a gradient."""

    def __init__(self) -> None:
        super().__init__(is_causal=True)
        self.phase = nn.Parameter(torch.zeros(8))

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().angles(x)
        return cos + self.phase, sin + self.phase


class Mirrored(Rotary):
    """It turns the other way round."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., :4], x[..., 4:]
        return (x * cos) + (torch.cat((second, -first), dim=-1) * sin)


class Thirds(Rotary):
    """The parts that turn together are not halves."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x * cos) + (torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * sin)


@pytest.mark.parametrize("make", [Mirrored, Thirds])
def test_rotations_that_are_not_such(make: Callable[..., nn.Module]) -> None:
    assert _counts(_lowered(make(is_causal=True))) == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}


def test_angles_out_of_range_and_angles_with_a_gradient() -> None:
    graph = _lowered(Scaled(is_causal=True))
    assert _counts(graph) == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}
    assert any("scaled by 1.25" in reason for reason in _reasons(graph))
    graph = _lowered(Learned())
    assert "npu_rotary_mul" not in _counts(graph)
    assert any("in the middle of it is read by" in reason for reason in _reasons(graph))


@pytest.mark.parametrize(("width", "reason"), [(898 * 4, "below 896"), (770 * 4, "at most 768")])
def test_heads_that_are_too_wide(width: int, reason: str) -> None:
    class Wide(Rotary):
        def __init__(self) -> None:
            super().__init__()
            self.q = self.k = nn.Linear(16, width)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
            angle = torch.arange(x.shape[1]).view(1, 1, -1, 1) * torch.ones(width // 4)
            q = self.rotate(q, angle.cos(), angle.sin())
            return nn.functional.scaled_dot_product_attention(q, q, q, scale=1 / math.sqrt(width)).transpose(1, 2)

    assert any(reason in text for text in _reasons(_lowered(Wide())))
