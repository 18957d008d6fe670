"""``module.to(dtype)`` inside a forward does nothing where there is nothing to convert, under a trace too.

Routers of transformers cast their classifier at each call. Torch would put converted tensors into the module even where
they are the same, which it cannot do with traced ones. Where something changes, the first eager call would convert the
weights for good: that is refused, by module path and source line, with the conversion that belongs before `transform`.

Private torch API used here: ``torch._C._nn._parse_to``, by which ``Module.to`` itself reads its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ep_fx.capture.names import running_line

_to = nn.Module.to
_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
"""The methods of a module that are a ``to(dtype)``."""


@contextmanager
def without_idle_conversions(model: nn.Module) -> Iterator[None]:
    """While open, conversions leave a module alone that is what they ask for.

    Raises (from the conversion):
        ValueError: a module of `model` is not what it asks for.
    """
    paths = {module: path for path, module in model.named_modules()}

    def convert(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if self in paths and (found := _changed(self, device, dtype)):
            raise _refusal(paths[self], self, *found, dtype if dtype is not None else device)
        return self if layout is None and not _changed(self, device, dtype) else _to(self, *args, **kwargs)

    def named(dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
        return lambda self: convert(self, dtype)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "to", convert))
        for method, dtype in _DTYPES.items():
            stack.enter_context(patch.object(nn.Module, method, named(dtype)))
        yield


def _changed(
    module: nn.Module, device: torch.device | None, dtype: torch.dtype | None
) -> tuple[str, torch.dtype | torch.device] | None:
    """The first parameter or buffer that would change, and what it is; None where none would."""
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if dtype is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
            return name, tensor.dtype
        if device is not None and tensor.device != device:
            return name, tensor.device
    return None


def _refusal(
    path: str, module: nn.Module, tensor: str, got: torch.dtype | torch.device, want: torch.dtype | torch.device
) -> ValueError:
    whole = f".get_submodule({path!r})" if path else ""
    return ValueError(
        f"{path or type(module).__name__} ({running_line() or 'source unknown'}): forward converts this module for "
        f"good, its {tensor} is {got} and becomes {want}; a graph cannot change the weights of its model. Convert it, "
        f"and each like it, before transform, as the first call would: model{whole}.to({want!r}). Modules of one unit "
        f"may differ in dtype"
    )
