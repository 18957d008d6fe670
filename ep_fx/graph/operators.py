"""Targets of nodes as text and back.

    aten.mm   aten.add.Tensor   ep_fx.unshard   c10d.all_to_all_single     operators: namespace, name, overload
    mul   dispatch_context                                                 Python's operators, functions of ep_fx.ops
    math.floor   builtins.max   torch.sym_float                            arithmetic on sizes
    npu.npu_swiglu                                                         functions of ep_fx.targets.npu, not read back

Nothing else has a text that is read back: what a text names can compute, and do nothing else.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import fx

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


def check_call(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises where `target` cannot be called so: the number of arguments, their names, a text or a list for a tensor.

    Raises:
        ValueError: what it takes, and what it is given.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        if getattr(ops, target.__name__, None) is target:
            inspect.signature(target).bind(*args, **kwargs)
        return
    known = schema.arguments
    given = dict(zip((argument.name for argument in known), args, strict=False)) | dict(kwargs)
    lacks = [a.name for a in known if a.name not in given and not a.has_default_value()]
    more = len(args) + len(kwargs) != len(given) or not given.keys() <= {a.name for a in known}
    if lacks or more:
        got = ", ".join(["..."] * len(args) + list(kwargs)) or "nothing"
        raise ValueError(f"{target_text(target)} takes ({', '.join(a.name for a in known)}), got ({got})")
    for argument in known:
        if argument.name in given and not _fits(argument.type, given[argument.name]):
            what = f"{argument.name} of {target_text(target)}"
            raise ValueError(f"expected {argument.type} as {what}, got {type(given[argument.name]).__name__}")


def _fits(kind: Any, value: Any) -> bool:
    """Whether a literal can stand where a schema says `kind`; of a node it is known that it is no text."""
    if isinstance(kind, torch.OptionalType):
        return value is None or _fits(kind.getElementType(), value)
    if isinstance(kind, torch.StringType):
        return isinstance(value, str)
    if isinstance(kind, torch.ListType):
        each = kind.getElementType()
        many = isinstance(value, (list, tuple))
        return all(_fits(each, item) for item in value) if many else not isinstance(value, (str, dict, slice))
    if isinstance(kind, torch.TensorType):
        return isinstance(value, (fx.Node, bool, int, float, complex))
    return not isinstance(kind, torch.IntType) or not isinstance(value, (str, list, tuple, dict, slice))


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
