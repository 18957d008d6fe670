"""``torch.nn.functional.scaled_dot_product_attention`` stays one node while a capture for such a target runs.

Torch would take it apart by what the device of the trace has: on CPU into a kernel of the CPU's, or into products and
a softmax. What the dialect's operator does not cover (dropout, a mask with a gradient, heads that broadcast, sizes not
known to agree) is left to torch.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode


class WholeAttention(TorchFunctionMode):
    """Calls ``ep_fx::attention`` in place of torch's attention."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        whole = _whole(*args, **named) if func is F.scaled_dot_product_attention else None
        return func(*args, **named) if whole is None else whole


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The result by the dialect's operator; None where it does not cover the call."""
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    if dropout_p > 0 or not _fits(query, key, value, enable_gqa) or not _is_plain(attn_mask, query, is_causal):
        return None
    factor = float(query.shape[-1]) ** -0.5 if scale is None else scale
    output: Tensor = torch.ops.ep_fx.attention(query, key, value, attn_mask, is_causal, factor)[0]
    return output


def _autocast(tensor: Tensor) -> Tensor:
    """What autocast, where it is on, would make of an operand."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.is_floating_point() and tensor.dtype is not torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _fits(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether these are ``[B,N,S,D]``, ``[B,K,T,D]``, ``[B,K,T,V]`` of one dtype, with K = N or a divisor of it."""
    if not all(t.dim() == 4 and t.dtype == query.dtype and t.is_floating_point() for t in (query, key, value)):
        return False
    pairs = [(query, key, 0), (query, key, 3), (key, value, 0), (key, value, 1), (key, value, 2)]
    heads, shared = query.shape[1], key.shape[1]
    widths = (heads, shared, query.shape[3], value.shape[3])
    if not all(isinstance(n, int) and n > 0 for n in widths) or not (enable_gqa or heads == shared):
        return False
    return heads % shared == 0 and all(statically_known_true(a.shape[d] == b.shape[d]) for a, b, d in pairs)


def _is_plain(mask: Tensor | None, query: Tensor, is_causal: bool) -> bool:
    """Whether the mask is one that the operator takes; torch refuses a mask together with `is_causal`."""
    if mask is None:
        return True
    return not is_causal and not mask.requires_grad and mask.dtype in (torch.bool, query.dtype) and mask.dim() <= 4
