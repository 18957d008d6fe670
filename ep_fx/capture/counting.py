"""``torch.bincount(ids, minlength=E)`` has E elements while a capture runs, as it does wherever every id is below E.

torch gives it as many elements as the largest id demands, a size that depends on values and that nothing after it can
rely on. An id of E or more, for which the eager result is longer, is an index error when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COUNTING = (torch.bincount, Tensor.bincount)


class BoundedCounts(TorchFunctionMode):
    """Replaces counts with a positive ``minlength`` and without weights; others stay as they are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _COUNTING:
            return func(*args, **(kwargs or {}))
        return _counts(func, *args, **(kwargs or {}))


def _counts(func: Callable[..., Any], input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    if weights is not None or not isinstance(minlength, int) or minlength < 1:
        return func(input, weights, minlength)
    zeros = torch.zeros(minlength, dtype=torch.int64, device=input.device)
    return zeros.scatter_add(0, input.to(torch.int64), torch.ones_like(input, dtype=torch.int64))
