"""Comparison of values that two ways to run an MoE block gave: as a whole, or row by row."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def equal(got: Any, want: Any, tol: float = 1e-5) -> bool:
    """Whether two values are the same to rounding; tensors in dtype, shape and places that are not finite too."""
    if got is want:
        return True
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return type(got) is type(want) and (not isinstance(want, (int, float, str, bool, tuple)) or got == want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.detach().double(), want.detach().double()
    finite = want.isfinite()
    if not finite.equal(got.isfinite()):
        return False
    got, want = got[finite], want[finite]
    return float((got - want).norm()) <= tol * float(want.norm()) + 1e-12


def alike(got: Any, want: Any, tol: float = 1e-5, broken: bool = False) -> bool:
    """Whether two values are the same row by row, so that what was done to small rows shows beside large ones.

    Args:
        broken: `want` may have more rows that are not finite than `got`: a product of a zero and an infinity. It may
            not have fewer: then something made them finite.
    """
    if not isinstance(want, Tensor) or not isinstance(got, Tensor) or want.dim() < 2 or want.numel() == 0:
        if broken and isinstance(want, Tensor) and isinstance(got, Tensor) and not want.isfinite().all():
            return got.shape == want.shape and got.dtype == want.dtype
        return equal(got, want, tol)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = (x.detach().double().flatten(0, -2) for x in (got, want))
    finite, wanted = got.isfinite().all(-1), want.isfinite().all(-1)
    if bool((wanted & ~finite).any()) or (not broken and bool((finite & ~wanted).any())):
        return False
    got, want = got[finite & wanted], want[finite & wanted]
    return bool(((got - want).norm(dim=-1) <= tol * want.norm(dim=-1) + 1e-12).all())
