"""Grouped products in the user's own code become the dialect's `grouped_mm` while a capture runs.

torch's fake kernel for ``torch.nn.functional.grouped_mm`` takes bf16 only, its backward refuses expanded gradients, and
rows past the last offset come back uninitialised; the dialect's operator has none of these faults and the same result.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_PRODUCTS = (F.grouped_mm, torch._grouped_mm)


_TOTALS = (torch.cumsum, torch.Tensor.cumsum)
_CASTS = (torch.Tensor.to, torch.Tensor.int, torch.Tensor.long, torch.Tensor.type)


class GroupedProducts(TorchFunctionMode):
    """Replaces ``grouped_mm(x [R, Din], w [E, Din, Dout], offs=...)``; other forms stay as they are.

    Running totals that were made from counts here lead back to these counts, so that the graph shows
    ``tokens_per_expert`` itself; other totals are taken apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Counts behind each tensor of running totals, by its id; the tensor is held, so that its id stays its own."""
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What each integer tensor was cast from."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _PRODUCTS and self._is_rows_by_experts(args, named):
            return self._product(*args, **named)
        result = func(*args, **named)
        if args and isinstance(args[0], torch.Tensor) and isinstance(result, torch.Tensor) and args[0].dim() == 1:
            self._note(func, args[0], result)
        return result

    def _note(self, func: Callable[..., Any], source: torch.Tensor, result: torch.Tensor) -> None:
        if source.is_floating_point() or result.is_floating_point():
            return
        if func in _TOTALS:
            self._counts[id(result)] = (result, self._casts.get(id(source), (source, source))[1])
        elif func in _CASTS:
            self._casts[id(result)] = (result, self._casts.get(id(source), (source, source))[1])
            if id(source) in self._counts:
                self._counts[id(result)] = (result, self._counts[id(source)][1])

    @staticmethod
    def _is_rows_by_experts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        x, weight = (*args, *(kwargs.get(name) for name in ("mat_a", "mat_b")))[:2]
        return isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and (x.dim(), weight.dim()) == (2, 3)

    def _product(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if offs is None:
            raise ValueError("grouped_mm of 2-D rows and 3-D weights needs offs, the running totals of rows per expert")
        if id(offs) in self._counts:
            counts = self._counts[id(offs)][1].to(torch.int64)
        else:
            counts = torch.ops.ep_fx.counts_of(offs)
        y: torch.Tensor = torch.ops.ep_fx.grouped_mm(mat_a, mat_b, counts, bias, False)
        return y if out_dtype is None else y.to(out_dtype)
