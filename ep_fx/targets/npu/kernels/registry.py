"""Registration of kernels: by name, each a function at the top of a module, so that generated code can import it.

A kernel reaches its operator through `call` and in no other way, so that what an operator would be given can be looked
at before it runs, on a machine that does not have it: `reached`. A kernel may have a fake twin, which gives the types
of its results where the operator is not there to give them: so a lowered graph can be propagated on any machine.
Private torch API used here: ``FakeTensor``.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils import _pytree as pytree

F = TypeVar("F", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., Any]] = {}
"""Every kernel that a lowered graph may call, by the name of the torch_npu operator."""

COMPOSITIONS: dict[str, Callable[..., Any]] = {}
"""Functions of a lowered graph that are made of operators of ATen which torch_npu runs on the device, by name."""


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
_ASKED: ContextVar[Callable[[Call], None] | None] = ContextVar("ep_fx_npu_asked", default=None)


@overload
def kernel(function: F) -> F: ...
@overload
def kernel(*, fake: Callable[..., Any], results: tuple[str, ...] = ()) -> Callable[[F], F]: ...
def kernel(function: Any = None, *, fake: Callable[..., Any] | None = None, results: tuple[str, ...] = ()) -> Any:
    """Enters a function that has the name of the torch_npu operator which it calls.

    Args:
        fake: same arguments, results of which only types count; used for fake tensors where the operator is not there.
        results: names of the results, for the text of a graph, where there are several.
    """

    def enter(found: Callable[..., Any]) -> Callable[..., Any]:
        return _enter(KERNELS, found if fake is None else _with_twin(found, fake), results)

    return enter if function is None else enter(function)


def composition(function: F) -> F:
    """Enters a function that is made of operators of ATen with a kernel in torch_npu."""
    _enter(COMPOSITIONS, function, ())
    return function


def _enter(
    into: dict[str, Callable[..., Any]], function: Callable[..., Any], results: tuple[str, ...]
) -> Callable[..., Any]:
    name = function.__name__
    if results:
        function.results = results  # type: ignore[attr-defined]
    if name in KERNELS or name in COMPOSITIONS:
        raise ValueError(f"kernel {name!r} is defined twice")
    into[name] = function
    return function


def _with_twin(function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def twin(*args: Any, **kwargs: Any) -> Any:
        absent = not _LOOKING.get() and not hasattr(torch.ops.npu, function.__name__)
        if absent and any(isinstance(value, FakeTensor) for value in pytree.tree_leaves((args, kwargs))):
            return fake(*args, **kwargs)
        return function(*args, **kwargs)

    twin.fake = fake  # type: ignore[attr-defined]
    return twin


def types_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What gives the types of the results of `function` on fake tensors: its twin, or itself where it has none."""
    found: Callable[..., Any] = getattr(function, "fake", function)
    return found


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is known to have no element; False for a size that only a run can tell."""
    return guard_or_false(tensor.numel() == 0)


def call(op: str, /, *args: Any, **kwargs: Any) -> Any:
    """``torch.ops.npu.<op>`` of these arguments, looked up now.

    Raises:
        AttributeError: this process has neither torch_npu nor a stand-in for it.
    """
    if _LOOKING.get():
        raise _ReachedError(Call(op, args, kwargs))
    if (ask := _ASKED.get()) is not None:
        ask(Call(op, args, kwargs))
    return getattr(torch.ops.npu, op)(*args, **kwargs)


@contextmanager
def asked_first(ask: Callable[[Call], None]) -> Iterator[None]:
    """While this is open, `ask` sees every call of an operator before it is made, and may raise."""
    token = _ASKED.set(ask)
    try:
        yield
    finally:
        _ASKED.reset(token)


def looking() -> bool:
    """Whether a kernel is asked what it would call, on values that need not be there."""
    return _LOOKING.get()


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
