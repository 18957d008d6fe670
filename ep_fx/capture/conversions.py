"""``module.to(dtype)`` inside a forward does nothing where there is nothing to convert, under a trace too.

Routers of transformers cast their classifier at each call. Torch would put converted tensors into the module even where
they are the same, which it cannot do with traced ones.

Private torch API used here: ``torch._C._nn._parse_to``, by which ``Module.to`` itself reads its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

_to = nn.Module.to


def _if_anything_changes(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    tensors = [*self.parameters(), *self.buffers()]
    cast = [t for t in tensors if dtype is not None and t.is_floating_point() and t.dtype is not dtype]
    moved = [t for t in tensors if device is not None and t.device != device]
    return _to(self, *args, **kwargs) if cast or moved or layout is not None else self


@contextmanager
def without_idle_conversions() -> Iterator[None]:
    """While open, ``Module.to`` leaves a module alone that is what it asks for."""
    with patch.object(nn.Module, "to", _if_anything_changes):
        yield
