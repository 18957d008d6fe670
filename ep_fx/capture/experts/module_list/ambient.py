"""Finds, in the source of a loop over experts, what trials cannot judge: modes of torch that it sets, or asks for.

The statements of a loop are taken out, so a `with` among them is lost, and what they ask of the caller's modes is
answered by the trials' modes. A `with` around the loop stays, but the experts are run there in another way than the
author wrote, which autocast would treat differently. Contexts that are known to change no number are let through.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

_HARMLESS = (contextlib.nullcontext, torch.autograd.profiler.record_function, torch.cuda.nvtx.range)
"""Contexts that may stand inside a loop, and be lost."""
_KEPT = (*_HARMLESS, torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)
"""Contexts that may stand around a loop: gradients are compared in trials, and a capture keeps these."""
_STATE = frozenset(
    {
        *("is_grad_enabled", "is_inference_mode_enabled", "set_grad_enabled", "no_grad", "enable_grad"),
        *("inference_mode", "set_default_dtype", "set_default_device", "set_float32_matmul_precision"),
        *("use_deterministic_algorithms", "set_flush_denormal", "custom_fwd"),
    }
)


def lost_inside(statements: Iterable[ast.stmt], names: Mapping[str, Any]) -> str | None:
    """Why `statements` cannot be replaced by a call, in words; None: nothing speaks against it.

    Args:
        names: what the names outside the method stand for.
    """
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, (ast.With, ast.AsyncWith)) and (reason := _context(node, names, _HARMLESS)):
                return f"{reason} stands inside the loop over experts, and is not known to change no number"
            if (name := _state(node, names)) is not None:
                return (
                    f"line {getattr(node, 'lineno', '?')}, {name}: the loop over experts sets or asks for a mode of "
                    "torch, and no trial shows what it does in others"
                )
    return None


def changed_around(
    definition: ast.FunctionDef, encloses: Callable[[ast.AST], bool], names: Mapping[str, Any]
) -> str | None:
    """Why a loop under `definition` cannot be replaced by a call where it stands, in words.

    Args:
        encloses: whether a node of `definition` holds the loop.
        names: what the names outside the method stand for.
    """
    for decorator in definition.decorator_list:
        if any("autocast" in n or n == "custom_fwd" for n in _names(decorator, names)):
            return f"line {decorator.lineno}, @{ast.unparse(decorator)}: experts under autocast are not recognised"
    for node in ast.walk(definition):
        is_with = isinstance(node, (ast.With, ast.AsyncWith))
        if is_with and encloses(node) and (reason := _context(node, names, _KEPT)):
            return f"{reason} stands around the loop over experts, and may change what they compute"
    return None


def _context(node: ast.AST, names: Mapping[str, Any], allowed: tuple[Any, ...]) -> str | None:
    assert isinstance(node, (ast.With, ast.AsyncWith))
    for item in node.items:
        made = item.context_expr
        value = _value(made.func, names) if isinstance(made, ast.Call) else None
        if not any(value is one for one in allowed):
            return f"line {node.lineno}, with {ast.unparse(made)}"
    return None


def _state(node: ast.AST, names: Mapping[str, Any]) -> str | None:
    """The mode of torch that a name or an attribute speaks of."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    return next((n for n in _own_names(node, names) if n in _STATE or "autocast" in n), None)


def _names(node: ast.AST, names: Mapping[str, Any]) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Name, ast.Attribute)):
            yield from _own_names(inner, names)


def _own_names(node: ast.Name | ast.Attribute, names: Mapping[str, Any]) -> tuple[str, ...]:
    """How it is written, and what is behind it calls itself: a function may be imported under another name."""
    written = node.id if isinstance(node, ast.Name) else node.attr
    value = _value(node, names)
    module = str(getattr(value, "__module__", "") or "")
    own = getattr(value, "__name__", None) if callable(value) and module.split(".")[0] == "torch" else None
    return (written, own) if isinstance(own, str) else (written,)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a dotted name outside the method stands for; None: it is something else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _value(node.value, names)
    return vars(owner).get(node.attr) if isinstance(owner, type(ast)) else None
