"""The forms of RMS norms and of rotary embeddings that are recognised, each as a function that is traced.

    x [..., H]    weight [H]         one norm a row
    x [B,N,S,D]   cos, sin [B|1,1,S,D], or D/2 wide where the pairs that turn together are neighbours (DeepSeek-V3)
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_fx.targets.npu.patterns import Example

EPSILON = 0.00146484375
"""Stands for any epsilon; a number that fp32 holds exactly, since torch's own norm rounds it so."""


def _normalised(x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return wide * torch.rsqrt(variance + EPSILON)


def _cast_before_weight(x: Tensor, weight: Tensor) -> Tensor:
    return weight * _normalised(x).to(x.dtype)


def _cast_after_weight(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * _normalised(x)).to(x.dtype)


def _of_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPSILON)


def _weights(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.empty(x.shape[-1:], dtype=x.dtype),)


_FORMS = {
    "normalise, cast, weigh": _cast_before_weight, "normalise, weigh, cast": _cast_after_weight,
    "torch.nn.functional.rms_norm": _of_torch,
}
NORMS = tuple(
    Example(name, function, _weights, ("x", "weight"), ("x", "weight"), ((EPSILON, "epsilon"),))
    for name, function in _FORMS.items()
)


def _turned(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (_turned(x) * sin)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def _angles(x: Tensor) -> tuple[Tensor, ...]:
    shape = (1, 1, *x.shape[2:])
    return tuple(torch.empty(shape, dtype=x.dtype) for _ in range(2))


def _half_angles(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(angle[..., : x.shape[-1] // 2] for angle in _angles(x))


ROTARY_HALVES = Example("first half with second half", _halves, _angles, ("x", "cos", "sin"), ("x",))
ROTARY_PAIRS = Example("neighbours, written as halves", _pairs, _half_angles, ("x", "cos", "sin"), ("x",))
