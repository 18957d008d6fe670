"""The inputs on which an MoE block is tried: ordinary ones, and those for which authors write guards.

A clamp, a threshold, a skipped padding token or a replaced NaN changes nothing on ordinary tokens. So there are trials
in which tokens, weights of the routing and answers of the experts have extreme sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["plain", "rows", "sharp", "broken"]
"""What is special about a probe.

rows    tokens that are zero, equal, constant, tiny and huge; experts with tiny answers
sharp   routers from flat to one-hot, weights from 1 down to nothing; answers from 1 to 1e12, so that each weight shows
broken  some experts answer with infinities
"""
_WORDS: dict[Kind, str] = {
    "plain": "ordinary tokens",
    "rows": "tokens that are zero, equal, constant, tiny or huge (does it skip padding, or clamp?)",
    "sharp": "weights near zero or answers of experts up to 1e12 (does it skip small weights, or clamp?)",
    "broken": "answers of experts that are not finite (does it clamp, or replace NaN?)",
}
Grad = Literal["on", "off", "inference"]
_SHAPES = ((2, 12), (3, 7), (1, 1), (1, 256))
"""Tokens of a plain probe: two that hit many experts, one token, and many that are nearly equal and go one way."""
_SPECIAL: tuple[tuple[Kind, tuple[int, int]], ...] = (("rows", (2, 12)), ("sharp", (2, 40)), ("broken", (2, 12)))
_FACTORS = (0.0, 1.0, 1.0, 1e-6, 1e6, 1.0)
"""Sizes of the tokens of a probe of rows."""


@dataclass(frozen=True)
class Case:
    """One probe.

    Args:
        tokens: batch and length.
        rank: dimensions of the input, 3: [B, S, D], 2: [B * S, D].
        training: mode.
        seed: of weights and tokens.
        kind: see `Kind`.
        grad: whether autograd records.
    """

    tokens: tuple[int, int]
    rank: int
    training: bool
    seed: int
    kind: Kind = "plain"
    grad: Grad = "on"

    @property
    def what(self) -> str:
        """What is special about it, in words that go on after "for"."""
        if self.grad != "on":
            return "runs without autograd"
        return _WORDS[self.kind]


def cases(rank: int) -> list[Case]:
    """Probes of one rank of the input, in both modes; plain ones with gradients come first."""
    modes = (True, False)
    found = [Case(tokens, rank, mode, seed) for seed, tokens in enumerate(_SHAPES) for mode in modes]
    found += [Case(shape, rank, mode, seed, kind) for seed, (kind, shape) in enumerate(_SPECIAL, 9) for mode in modes]
    off: tuple[Grad, ...] = ("off", "inference")
    return [*found, *(Case(_SHAPES[0], rank, mode, 5, "plain", grad) for grad in off for mode in modes)]


def answers(kind: Kind, number: int) -> Tensor:
    """The sizes [E] of the experts' answers."""
    ones = torch.ones(number, dtype=torch.float64)
    if kind == "rows":
        return 1e-6 * ones
    if kind == "sharp":
        return torch.logspace(0, 12, number, dtype=torch.float64)[torch.randperm(number)]
    return torch.where(torch.arange(number) % 3 == 0, torch.inf, ones) if kind == "broken" else ones


def sized(kind: Kind, x: Tensor) -> Tensor:
    """Random tokens [B, S, D] as a probe of this kind wants them."""
    rows = x.flatten(0, 1).clone()
    if kind == "sharp":
        rows *= torch.logspace(-3, 1, rows.shape[0], dtype=x.dtype)[torch.randperm(rows.shape[0])].unsqueeze(1)
    if kind == "rows":
        number = len(_FACTORS)
        rows *= torch.tensor(_FACTORS, dtype=x.dtype).repeat(rows.shape[0] // number).unsqueeze(1)
        rows[2::number] = rows[1::number]
        rows[number - 1 :: number] = -1e4
    return rows.view(x.shape)
