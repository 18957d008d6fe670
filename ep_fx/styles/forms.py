"""The forms of experts that a style knows how to call, and by what a module is recognised as one of them."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

_COUNTS = ("num_tokens_per_expert", "tokens_per_expert")
_FLAGS = ("is_transposed", "has_gate", "has_bias", "_apply_gate", "num_experts", "config")


@dataclass(frozen=True)
class Form:
    """One form.

    Args:
        text: in words, for messages.
        accepts: whether a module has it.
        num_experts: number of experts in a module that has it.
    """

    text: str
    accepts: Callable[[nn.Module], bool]
    num_experts: Callable[[nn.Module], int]


def _is_grouped(module: nn.Module) -> bool:
    names = list(inspect.signature(module.forward).parameters)
    shapes = [p.shape for p in module.parameters(recurse=False)]
    leading = {shape[0] if shape else None for shape in shapes}
    return len(names) >= 2 and names[1] in _COUNTS and any(len(s) >= 3 for s in shapes) and len(leading) == 1


def odd_parameters(module: nn.Module) -> str:
    """What keeps a module with the signature of `GROUPED` out of it, where that is the shapes of its parameters."""
    names = list(inspect.signature(module.forward).parameters)
    shapes = {name: list(p.shape) for name, p in module.named_parameters(recurse=False)}
    if _is_grouped(module) or len(names) < 2 or names[1] not in _COUNTS or not shapes:
        return ""
    found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return (
        f"its own parameters must all be [E, ...], one of them 3-D, got {found}; put what all experts share in a "
        "submodule"
    )


def _is_transformers(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


GROUPED = Form(
    "experts(x, num_tokens_per_expert, scores=None) with 3-D parameters [E, ...]; ep_fx.nn.GroupedExperts",
    _is_grouped,
    lambda module: int(next(module.parameters(recurse=False)).shape[0]),
)
"""``experts(x[N, D] in expert order, num_tokens_per_expert[E], scores[N] = None)``, by the second argument's name and
parameters that share dim 0."""
TRANSFORMERS = Form(
    "transformers experts decorated with use_experts_implementation",
    _is_transformers,
    lambda module: int(cast(Any, module).num_experts),
)
"""``experts(hidden[T, D], top_k_index[T, K], top_k_weights[T, K])``, by the attributes that the decorator sets."""
EAGER_FORMS = (TRANSFORMERS, GROUPED)


def form_of(module: nn.Module) -> Form | None:
    """The form of `module`; None where it has none of them."""
    return next((form for form in EAGER_FORMS if form.accepts(module)), None)
