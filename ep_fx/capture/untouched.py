"""A capture leaves the model as it found it: attributes, hooks and buffers are restored, and leaks are refused.

A model that stores a tensor on itself in forward would keep a fake tensor, and the stored value would be frozen at
capture: that is refused by name, except for what models of transformers keep for the next step of a generation. So is a
buffer that forward rebinds (``self.c = self.c + 1``), whose update a graph would silently lose; an in-place update
(``self.c.add_(1)``) is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OWN = ("_parameters", "_buffers", "_modules", *_HOOKS)
_FOR_GENERATION = ("rope_deltas",)
"""Attributes of transformers' models that only a call with a generation cache reads."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores attributes and hooks of every submodule at the end.

    Raises:
        ValueError: forward stored a traced tensor on a module.
    """
    attributes = {module: dict(module.__dict__) for module in model.modules()}
    hooks = {module: {name: dict(getattr(module, name)) for name in _HOOKS} for module in model.modules()}
    try:
        yield
        _refuse_stored_tensors(model, attributes)
    finally:
        for module in model.modules():
            for name, before in hooks[module].items():
                live = getattr(module, name)
                live.clear()
                live.update(before)
            for name in set(module.__dict__) - set(attributes[module]):
                del module.__dict__[name]
            module.__dict__.update(attributes[module])


def _refuse_stored_tensors(model: nn.Module, attributes: dict[nn.Module, dict[str, Any]]) -> None:
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name in _OWN or attributes[module].get(name) is value or _is_for_generation(module, name):
                continue
            if any(isinstance(x, (FakeTensor, torch.SymInt)) for x in pytree.tree_leaves(value)):
                raise ValueError(
                    f"{path or type(model).__name__}.{name}: forward stores a tensor on the module; it would be frozen "
                    f"at capture and carry state between micro-batches. Return it from forward instead"
                )


def _is_for_generation(module: nn.Module, name: str) -> bool:
    return name in _FOR_GENERATION and type(module).__module__.startswith("transformers.")


def refuse_rebound_buffers(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    """Checks, before the buffers are put back, that forward updated them in place or not at all.

    Raises:
        ValueError: a buffer was replaced by another tensor.
    """
    for name, buffer in given.items():
        path, _, leaf = name.rpartition(".")
        if model.get_submodule(path)._buffers.get(leaf) is not buffer:
            raise ValueError(
                f"buffer {name!r}: forward rebinds it to a new tensor, and the update would be lost; update it in "
                f"place, e.g. self.{leaf}.copy_(...) or self.{leaf}.add_(...)"
            )
