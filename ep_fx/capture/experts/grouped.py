"""Form 2: ``experts(x[N, D] in expert order, num_tokens_per_expert[E], scores[N] = None)`` with parameters [E, ...].

Dispatch stands at its input and combine at its output; the body is traced as it is, with the parameters and counts
of the local experts. `scores` may be passed by position or by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ep_fx.capture.experts.base import Cut, Experts, cut_by_name, where
from ep_fx.styles.forms import GROUPED


class Grouped:
    """Recognises a module by its second argument's name and by parameters that share dim 0."""

    name = "grouped"
    form = GROUPED.text

    def accepts(self, module: nn.Module) -> bool:
        """Whether the signature and the parameters have this form."""
        return GROUPED.accepts(module)

    def num_experts(self, module: nn.Module) -> int:
        """Dim 0 of the parameters."""
        return GROUPED.num_experts(module)

    def cut(self, module: nn.Module, name: str) -> Cut | None:
        """By name, see `cut_by_name`."""
        return cut_by_name(name)

    @contextmanager
    def install(self, experts: Sequence[Experts]) -> Iterator[None]:
        """Puts a wrapper over each module's forward; it is taken off at the end."""
        try:
            for item in experts:
                object.__setattr__(item.module, "forward", _wrapped(item, item.module.forward))
            yield
        finally:
            for item in experts:
                item.module.__dict__.pop("forward", None)


def _wrapped(experts: Experts, body: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    signature = inspect.signature(body)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs)
        x_name, counts_name, *others = list(call.arguments)
        x, counts = call.arguments[x_name], call.arguments[counts_name]
        scores_name = _scores_argument(experts, call, others)
        scores = call.arguments[scores_name] if scores_name else None
        _check_input(experts, x, counts, scores)
        flat = scores.reshape(-1) if scores is not None else None
        routed, weights, local, indices, splits = torch.ops.ep_fx.dispatch(
            x, counts.to(torch.int64).contiguous(), flat, experts.ep, experts.path
        )
        call.arguments[x_name], call.arguments[counts_name] = experts.enter(routed), local.to(counts.dtype)
        if scores is not None and scores_name is not None:
            call.arguments[scores_name] = experts.enter(weights).reshape(-1, *scores.shape[1:])
        routed_output = experts.leave(_run(experts, body, call))
        back: torch.Tensor = torch.ops.ep_fx.combine(routed_output, indices, splits, x.shape[0], experts.path)
        return back

    return forward


def _run(experts: Experts, body: Callable[..., Any], call: inspect.BoundArguments) -> torch.Tensor:
    try:
        result = body(*call.args, **call.kwargs)
    except Exception as error:
        local = experts.num_experts // experts.ep
        part = f", and 1/{experts.tp} of the hidden features of each for tp={experts.tp}" if experts.tp > 1 else ""
        raise ValueError(
            f"{experts.path} ({where(experts.module)}): the body of these experts cannot be traced with the {local} "
            f"local experts of {experts.num_experts} that a rank holds for ep={experts.ep}{part}; take sizes from "
            f"num_tokens_per_expert or from the parameters, not from a constant, and do not branch on counts: {error}"
        ) from error
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{experts.path}: experts must return one tensor [N, D], got {type(result).__name__}")
    return result


def _scores_argument(experts: Experts, call: inspect.BoundArguments, others: list[str]) -> str | None:
    tensors = [name for name in others if isinstance(call.arguments[name], torch.Tensor)]
    if len(tensors) > 1:
        raise ValueError(
            f"{experts.path} ({where(experts.module)}): besides x and the counts one tensor of scores [N] is accepted, "
            f"got {tensors}"
        )
    return tensors[0] if tensors else None


def _check_input(experts: Experts, x: Any, counts: Any, scores: torch.Tensor | None) -> None:
    if x.dim() != 2 or tuple(counts.shape) != (experts.num_experts,):
        raise ValueError(
            f"{experts.path} ({where(experts.module)}): expected x [N, D] in expert order and counts "
            f"[{experts.num_experts}], got {tuple(x.shape)} and {tuple(counts.shape)}"
        )
    if scores is not None and scores.dim() not in (1, 2):
        raise ValueError(f"{experts.path}: scores must be [N] or [N, 1], got {tuple(scores.shape)}")
