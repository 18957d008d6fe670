"""Norms, rotary embeddings and attention on the NPU's kernels give the values and gradients of eager PyTorch."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_fx
from ep_fx.graph import target_name
from ep_fx.testing.ranks import RankPool, local_mesh
from tests.oracle import gradients_of

Counts = dict[str, int]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Norm(nn.Module):
    """The norm of transformers' decoders, of a stream that goes on beside it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.before, self.weight = nn.Linear(width, width), nn.Parameter(torch.linspace(0.5, 2, width))

    def norm(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + torch.tanh(self.norm(x)) + x.sin()


class CastLast(Norm):
    def norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


class OfTorch(Norm):
    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class OfHeads(Norm):
    """Each head has its norm, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 4))

    def norm(self, x: Tensor) -> Tensor:
        return super().norm(x.unflatten(-1, (4, 4)).transpose(1, 2)).transpose(1, 2).flatten(-2)


class Rotary(nn.Module):
    """Keys and queries rotated by angles that they share, and attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.options = nn.Linear(16, 32), nn.Linear(16, 16), options

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        speeds = torch.tensor([1.0, 0.3, 0.1, 0.03], device=x.device)
        turns = torch.arange(x.shape[1], device=x.device)[:, None] * speeds
        angles = torch.cat((turns, turns), -1)[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (angle.unsqueeze(1) for angle in self.angles(x))
        q, k = (m(x).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (self.q, self.k))
        q, v, k = self.rotate(q, cos, sin), k, self.rotate(k, cos, sin)
        options = {n: o(x) if callable(o) else o for n, o in self.options.items()}
        return F.scaled_dot_product_attention(q, k, v[..., :6], enable_gqa=True, **options).transpose(1, 2).flatten(-2)


class Pairs(Rotary):
    """DeepSeek-V3's: neighbours turn together."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin, even, odd = cos[..., :4], sin[..., :4], x[..., 0::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class HeadsLast(Rotary):
    """Rotation of ``[B, S, N, D]``."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)).transpose(1, 2)


def _seen(x: Tensor) -> Tensor:
    """``[B, 1, S, S]``; the third query of the first sequence sees no key."""
    order = torch.arange(x.shape[1], device=x.device)
    seen = (order[:, None] >= order)[None, None].expand(x.shape[0], 1, -1, -1)
    first = torch.arange(x.shape[0], device=x.device)[:, None, None, None] == 0
    return seen & ~(first & (order[:, None] == 2))


def _bias(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1], device=x.device, dtype=x.dtype) + 0.5


NORM: Counts = {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}
ROTATED: Counts = {"npu_rotary_mul": 2, "npu_rotary_mul_backward": 2}
ATTENDED: Counts = {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}
CASES: dict[str, tuple[Callable[[], nn.Module], Counts]] = {
    "norm": (Norm, NORM),
    "norm, cast last": (CastLast, NORM),
    "norm of torch": (OfTorch, NORM),
    "norm of heads": (OfHeads, NORM),
    "causal": (lambda: Rotary(is_causal=True), ROTATED | ATTENDED),
    "no mask": (lambda: Pairs(scale=0.7), ROTATED | ATTENDED),
    "mask": (lambda: HeadsLast(attn_mask=_seen), ROTATED | ATTENDED),
    "keys": (lambda: Rotary(attn_mask=lambda x: (x[:, None, None, :, 0] < 10)), ROTATED | ATTENDED),
    "added mask": (lambda: Rotary(attn_mask=_bias), ROTATED),
}


def _model(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def _run(rank: int, case: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Counts, dict[str, float]]:
    """Kernels in the graph, and the relative error of the output and of each gradient."""
    make, _ = CASES[case]
    eager = _model(make, dtype)
    module = ep_fx.transform(copy.deepcopy(eager), local_mesh(fsdp=1), plan={})
    for size in (shape, (shape[0] + 1, shape[1] + 2, 16)):
        x = torch.randn(size, dtype=dtype)
        eager.zero_grad()
        module.zero_grad()
        want, got = eager(x), module(x.to("npu"))
        grad = torch.randn_like(want)
        want.backward(grad)
        got.backward(grad.to("npu"))
    expected = {"output": want.detach(), **gradients_of(eager)}
    found = {"output": got.detach(), **{n: p.grad.full_tensor() for n, p in module.named_parameters()}}  # type: ignore[union-attr]
    names = [target_name(node) for node in module.lowered]
    counts = {name: names.count(name) for name in sorted(set(names)) if name.startswith("npu_")}
    return counts, {name: _error(found[name].cpu(), expected[name]) for name in expected}


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / (want.double().norm() + 1e-30))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_eager(npu_rank: RankPool, case: str, dtype: torch.dtype) -> None:
    ((counts, errors),) = npu_rank.run(_run, case, dtype, (2, 5, 16))
    assert counts == CASES[case][1]
    assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("case", ["norm", "causal", "no mask", "mask"])
def test_a_batch_of_no_sequences(npu_rank: RankPool, case: str) -> None:
    ((_, errors),) = npu_rank.run(_run, case, torch.float32, (0, 5, 16))
    assert all(error <= 1e-5 for error in errors.values()), errors
