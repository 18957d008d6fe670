"""Activation checkpointing of the user's own is taken out of a capture: numbers are the same, memory is not saved.

Its recomputation would route anew and repeat every exchange in backward, and runs when the traced parameters are gone.

Private torch API used here: ``torch.utils.checkpoint._checkpoint_without_reentrant_generator`` and the global name of
``CheckpointFunction``, which ``checkpoint`` looks up at each call, however it was bound by the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint as checkpointing


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of the generator that runs before and after the checkpointed function."""
    yield


class _Plain:
    """In place of the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Calls the function."""
        return function(*args)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """While open, a checkpointed function is simply called."""
    with (
        patch.object(checkpointing, "_checkpoint_without_reentrant_generator", _nothing_around),
        patch.object(checkpointing, "CheckpointFunction", _Plain),
    ):
        yield
