"""Registration of the dialect: every operator of ``torch.ops.ep_fx`` is defined through `register`.

Each has a kernel for every device, a fake kernel that holds for symbolic sizes, and, if differentiable, a formula
whose backward is an operator too, so that a trace shows one node for each direction. Importing twice is harmless.

A target may have kernels of its own for a device. It offers them (`offer_kernels`), and who is about to run operators
there asks for them (`use_kernels`): this module knows neither the targets nor their devices.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

NAMESPACE = "ep_fx"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

KERNELS: dict[str, Callable[..., Any]] = {}
"""The kernel for every device of each operator, by its name."""
_OFFERED: dict[str, Callable[[], Mapping[str, Callable[..., Any]]]] = {}
"""For a device what gives the kernels that are its own; taken out when they are in use."""


def register(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Defines ``ep_fx::<schema>``; an operator that is already there is left as it is.

    Args:
        schema: name, arguments and returns, with alias annotations where results share memory with arguments.
        kernel: the computation, on any device.
        fake: the results' shapes, dtypes and strides.
        setup_context, backward: autograd formula as for `torch.library.register_autograd`.
    """
    name = schema[: schema.index("(")]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    KERNELS[name] = kernel
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    elif name.endswith("_backward"):
        torch.library.register_autograd(qualified, _no_double_backward, lib=_LIBRARY)


def offer_kernels(device_type: str, kernels: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Says what gives the kernels that operators of the dialect have of their own on a device, by their names."""
    _OFFERED[device_type] = kernels


def use_kernels(device_type: str) -> None:
    """From now on operators run on `device_type` with its own kernels, where some were offered; again is harmless.

    Formulas of autograd and fake kernels stay those of the dialect.
    """
    offered = _OFFERED.pop(device_type, None)
    if offered is not None:
        for name, kernel in offered().items():
            torch.library.register_kernel(f"{NAMESPACE}::{name}", device_type, kernel, lib=_LIBRARY)


def _no_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("ep_fx operators are differentiable once: no gradient flows through a backward operator")


def no_grads(count: int) -> tuple[None, ...]:
    """The gradients of `count` arguments that have none."""
    return (None,) * count


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Dtype in which sums over `tensors` are kept: the widest of theirs, at least fp32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def inverse_permutation(permutation: torch.Tensor) -> torch.Tensor:
    """`inverse` with ``inverse[permutation[i]] == i``."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.shape[0], device=permutation.device)
    return inverse
