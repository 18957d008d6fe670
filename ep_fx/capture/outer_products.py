"""Products of one column of routed rows, ``[N, 1] @ [1, D]``, become the multiplication that they are, in a capture.

An adapter of rank 1 in experts makes them. How many rows a rank has is unknown to a graph, and the backward of torch's
product asks whether a column of them is laid out as a row, that is, whether there is just one: it cannot be captured.
Each element is one product either way, so outputs are the same.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)


class OuterProducts(TorchFunctionMode):
    """Replaces ``x @ w`` and ``linear(x, w, bias)`` where x is [N, 1] with unknown N; not under autocast, which casts
    the operands of products and not those of multiplications."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _PRODUCTS and len(args) == 2 and not named and _is_column(args[0], args[1], 0):
            return args[0] * args[1]
        if func is F.linear and len(args) >= 2 and _is_column(args[0], args[1], 1):
            bias = args[2] if len(args) > 2 else named.get("bias")
            y = args[0] * args[1].t()
            return y if bias is None else y + bias
        return func(*args, **named)


def _is_column(x: Any, weight: Any, dim: int) -> bool:
    """Whether `x` is [N, 1] with unknown N, and `weight` has size 1 along `dim` and the same dtype."""
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor) or (x.dim(), weight.dim()) != (2, 2):
        return False
    if not isinstance(x.shape[0], torch.SymInt) or isinstance(x.shape[1], torch.SymInt) or x.shape[1] != 1:
        return False
    plain = weight.shape[dim] == 1 and x.dtype is weight.dtype and not torch.is_autocast_enabled(x.device.type)
    return plain and bool(free_unbacked_symbols(x))
