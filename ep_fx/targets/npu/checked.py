"""`checked`: what a kernel would give its operator, held against the conditions, before anything runs.

    if (reason := checked(npu_swiglu, (node.args[0],)).reason) is not None:
        keep(node, "swiglu", reason)

The kernel itself converts indices and lays operands out, so it is the operator's arguments that are looked at, not the
node's. It runs on the recorded fake values up to its call of the operator; no guard is added.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from ep_fx.targets.npu.kernels.registry import reached
from ep_fx.targets.npu.preconditions import Checked, check

_NOTHING = Checked((), ())


def checked(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    result: Any = None,
    soc: str | None = None,
) -> Checked:
    """Whether `kernel` may be called so.

    Args:
        kernel: a function of ``ep_fx.targets.npu.kernels``.
        args, kwargs: of the call; nodes stand for their recorded values.
        result: what the (first) result is taken to be: a node, a tensor, or None.
        soc: the chip, ``"A2"`` or ``"A3"``; None: not known.

    Raises:
        KeyError: the kernel calls an operator of which no conditions are known.
        ValueError: a node has no recorded value.
    """
    args, kwargs, result = fx.node.map_arg((tuple(args), dict(kwargs or {}), result), recorded)
    first = next((v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)), None)
    tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    mode = detect_fake_mode(tensors)
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
                stack.enter_context(mode.shape_env.suppress_guards())
        call = reached(kernel, *args, **kwargs)
        return _NOTHING if call is None else check(call.op, call.args, call.kwargs, result=first, soc=soc)


def recorded(node: fx.Node) -> Any:
    """The value that was recorded of `node`.

    Raises:
        ValueError: there is none.
    """
    value = node.meta.get("val")
    if value is None:
        raise ValueError(f"%{node.name} has no recorded value, so the conditions on it cannot be checked")
    return value
