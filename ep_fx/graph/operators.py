"""Targets of nodes as text and back.

    aten.mm   aten.add.Tensor   ep_fx.unshard   c10d.all_to_all_single     operators: namespace, name, overload
    mul   dispatch_context                                                 Python's operators, functions of ep_fx.ops
    math.floor   builtins.max   torch.sym_float                            arithmetic on sizes
    npu.npu_swiglu                                                         functions of ep_fx.targets.npu, not read back

Nothing else has a text that is read back: what a text names can compute, and do nothing else.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch

from ep_fx import ops

_NAMESPACES = {"_c10d_functional": "c10d", "_c10d_functional_autograd": "c10d_autograd"}
_FULL = {short: namespace for namespace, short in _NAMESPACES.items()}
_BUILTINS = frozenset({"abs", "bool", "float", "int", "max", "min", "pow", "round", "sum"})
_NO_ARITHMETIC = frozenset({"attrgetter", "call", "delitem", "itemgetter", "methodcaller", "setitem"})


@cache
def target_text(target: Any) -> str:
    """Text of the target of a ``call_function`` node."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        overload = f".{target._overloadname}" if target._overloadname != "default" else ""
        return f"{_NAMESPACES.get(namespace, namespace)}.{name}{overload}"
    name = getattr(target, "__name__", type(target).__name__)
    module = getattr(target, "__module__", None) or ""
    if getattr(operator, name, None) is target or getattr(ops, name, None) is target:
        return str(name)
    if module.startswith("ep_fx.targets."):
        module = module.split(".")[2]
    return f"{module}.{name}"


@cache
def find_target(text: str) -> Callable[..., Any]:
    """The target that `target_text` writes as `text`.

    Raises:
        ValueError: there is no such operator here, or it is none that a text may name.
    """
    first, _, rest = text.partition(".")
    found = _function(first, rest) if not rest or first in _MODULES else _operator(_FULL.get(first, first), rest)
    if found is None:
        raise ValueError(f"no operator {text!r}: it is not registered here, or no function that a graph may call")
    return cast(Callable[..., Any], found)


_MODULES: dict[str, ModuleType] = {"builtins": builtins, "math": math, "torch": torch}


def _function(module: str, name: str) -> Any:
    if not name:
        found = None if module in _NO_ARITHMETIC else getattr(operator, module, None)
        return getattr(ops, module, None) if found is None and module in ops.__all__ else found
    if module == "builtins" and name not in _BUILTINS:
        return None
    if module == "torch" and not name.startswith(("sym_", "_sym_")):
        return None
    return getattr(_MODULES[module], name, None)


def _operator(namespace: str, rest: str) -> Any:
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload or "default", None)
