"""What runs on the `npu` device of this process: counted by name, and refused where a test forbids it.

    with recorded() as calls: ...                 calls["npu::npu_swiglu"] == 4, names without overload
    with forbidden("aten::index_put_"): ...       the operator raises `ForbiddenError`, with its name
    with only(kernels): ...                       so does every ATen operator that is not among `kernels`: the device
                                                  would compute it on the CPU, or refuse it
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

_RECORDS: list[Counter[str]] = []
_FORBIDDEN: list[Collection[str]] = []
_ONLY: list[Collection[str]] = []


class ForbiddenError(RuntimeError):
    """An operator ran on the device that a test forbids there."""


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """How often each operator ran on the device, by qualified name such as ``aten::mm``; below autograd, and what
    a composition consists of under the names of its parts."""
    calls: Counter[str] = Counter()
    _RECORDS.append(calls)
    try:
        yield calls
    finally:
        _RECORDS[:] = [record for record in _RECORDS if record is not calls]


@contextmanager
def forbidden(*names: str) -> Iterator[None]:
    """Refuses operators of these qualified names.

    Raises:
        ForbiddenError: from the call of such an operator.
    """
    _FORBIDDEN.append(frozenset(names))
    try:
        yield
    finally:
        _FORBIDDEN.pop()


@contextmanager
def only(names: Collection[str]) -> Iterator[None]:
    """Refuses operators of the namespace ``aten`` that are not in `names`, e.g. ``aten.silu.default``.

    Raises:
        ForbiddenError: from the call of such an operator.
    """
    _ONLY.append(names)
    try:
        yield
    finally:
        _ONLY.pop()


def note(op: torch._ops.OpOverload) -> None:
    """Called by the device for each operator that runs on it.

    Raises:
        ForbiddenError: a test forbids the operator.
    """
    name = op._schema.name
    for record in _RECORDS:
        record[name] += 1
    if any(name in names for names in _FORBIDDEN):
        raise ForbiddenError(f"{name} is forbidden on the device here")
    if not name.startswith("aten::"):
        return
    if any(str(op) not in names for names in _ONLY):
        raise ForbiddenError(f"{op} is no kernel of the device: it would be computed on the CPU, or refused")
