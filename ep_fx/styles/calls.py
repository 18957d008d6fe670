"""How the experts of each form are called: their arguments as rows in expert order, and the body on local experts."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ep_fx.styles.forms import GROUPED, TRANSFORMERS, Form
from ep_fx.styles.forward import Split, through_experts

Forward = Callable[..., Tensor]


def _grouped(split: Split) -> Forward:
    """Rows, counts and scores travel as they are; the body gets those of the local experts in their place."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        call = inspect.signature(type(self).forward).bind(self, *args, **kwargs)
        own, x_name, counts_name, *others = list(call.arguments)
        x, counts = call.arguments[x_name], call.arguments[counts_name]
        scores_name = _scores_argument(split, call, others)
        scores = call.arguments[scores_name] if scores_name else None
        _check_call(split, x, counts, scores)

        def body(local: nn.Module, x: Tensor, counts: Tensor, scores: Tensor | None) -> Tensor:
            call.arguments.update({own: local, x_name: x, counts_name: counts})
            if scores_name:
                call.arguments[scores_name] = scores
            return cast(Tensor, type(self).forward(*call.args, **call.kwargs))

        return through_experts(split, self, x, counts, scores, body)

    return forward


def _scores_argument(split: Split, call: inspect.BoundArguments, others: list[str]) -> str | None:
    tensors = [name for name in others if isinstance(call.arguments[name], Tensor)]
    if len(tensors) > 1:
        raise ValueError(f"{split.path}: besides x and the counts one tensor of scores [N] is accepted, got {tensors}")
    return tensors[0] if tensors else None


def _check_call(split: Split, x: Any, counts: Any, scores: Tensor | None) -> None:
    if x.dim() != 2 or tuple(counts.shape) != (split.num_experts,):
        raise ValueError(
            f"{split.path}: expected x [N, D] in expert order and counts [{split.num_experts}], the number of experts "
            f"over all ranks, got {tuple(x.shape)} and {tuple(counts.shape)}"
        )
    if scores is not None and tuple(scores.shape) not in ((x.shape[0],), (x.shape[0], 1)):
        raise ValueError(f"{split.path}: scores must be [{x.shape[0]}] or [{x.shape[0]}, 1], got {tuple(scores.shape)}")


def _transformers(split: Split) -> Forward:
    """Tokens are permuted here. To the body, in whatever implementation the config names, a routed row is a token that
    chose one local expert with weight 1; the router's weights are applied when the rows are back."""
    attributes = {"num_experts": split.num_experts // split.size("ep")}

    def forward(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def body(local: nn.Module, x: Tensor, counts: Tensor, _: Tensor | None) -> Tensor:
            experts = torch.arange(counts.shape[0], device=x.device)
            ids = torch.repeat_interleave(experts, counts, output_size=x.shape[0]).unsqueeze(1)
            return cast(Tensor, type(self).forward(local, x, ids, x.new_ones(ids.shape)))

        ops = torch.ops.ep_fx
        rows, counts, order = ops.permute(hidden, top_k_index, split.num_experts)
        back = through_experts(split, self, rows, counts, None, body, attributes)
        return cast(Tensor, ops.unpermute(back, order, top_k_weights).to(hidden.dtype))

    return forward


CALLS: Mapping[Form, Callable[[Split], Forward]] = {GROUPED: _grouped, TRANSFORMERS: _transformers}
"""For each form, the forward of experts that are split."""
