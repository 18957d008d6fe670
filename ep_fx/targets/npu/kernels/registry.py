"""Registration of kernels: by name, each a function at the top of a module, so that generated code can import it.

A kernel reaches its operator through `call` and in no other way, so that what an operator would be given can be looked
at before it runs, on a machine that does not have it: `reached`.
"""
from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., Any]] = {}
"""Every kernel that a lowered graph may call, by the name of the torch_npu operator."""


class Call(NamedTuple):
    """A call of an operator of the namespace ``npu``."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _ReachedError(Exception):
    """Ends a kernel at its call of the operator."""

    def __init__(self, call: Call) -> None:
        self.call = call
        super().__init__(call.op)


_LOOKING: ContextVar[bool] = ContextVar("ep_fx_npu_looking", default=False)


def kernel(function: F) -> F:
    """Enters `function`, which has the name of the operator that it calls."""
    name = function.__name__
    if name in KERNELS:
        raise ValueError(f"kernel {name!r} is defined twice")
    KERNELS[name] = function
    return function


def call(op: str, /, *args: Any, **kwargs: Any) -> Any:
    """``torch.ops.npu.<op>`` of these arguments, looked up now.

    Raises:
        AttributeError: this process has neither torch_npu nor a stand-in for it.
    """
    if _LOOKING.get():
        raise _ReachedError(Call(op, args, kwargs))
    return getattr(torch.ops.npu, op)(*args, **kwargs)


def reached(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call | None:
    """The call of an operator that a kernel would make, without making it; None where it answers by itself.

    Args:
        function: the kernel.
        args, kwargs: of the kernel; fake tensors where nothing should be computed.
    """
    token = _LOOKING.set(True)
    try:
        function(*args, **kwargs)
    except _ReachedError as found:
        return found.call
    finally:
        _LOOKING.reset(token)
    return None
