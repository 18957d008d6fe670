"""Registration of kernels: by name, each a function at the top of a module, so that generated code can import it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., Any]] = {}
"""Every kernel that a lowered graph may call, by the name of the torch_npu operator."""


def kernel(function: F) -> F:
    """Enters `function`, which has the name of the operator that it calls."""
    name = function.__name__
    if name in KERNELS:
        raise ValueError(f"kernel {name!r} is defined twice")
    KERNELS[name] = function
    return function
