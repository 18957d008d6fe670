"""Form 1: experts of transformers with the experts interface, ``experts(hidden, top_k_index, top_k_weights)``.

One function serves every such architecture. It is entered in transformers' own registry, and named in the config of
each experts module, for the time of the capture only. Routers stay as they are.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ep_fx.capture.experts.base import Experts
from ep_fx.styles.forms import TRANSFORMERS

_IMPLEMENTATION = "_experts_implementation_internal"
_NAME = "ep_fx"


class HuggingFace:
    """Recognises experts by the attributes that transformers' ``use_experts_implementation`` sets."""

    name = "huggingface"
    form = TRANSFORMERS.text

    def accepts(self, module: nn.Module) -> bool:
        """Whether the decorator has been at work on `module`."""
        return TRANSFORMERS.accepts(module)

    def num_experts(self, module: nn.Module) -> int:
        """Number of experts, from the module."""
        return TRANSFORMERS.num_experts(module)

    @contextmanager
    def install(self, experts: Sequence[Experts]) -> Iterator[None]:
        """Registers the function and names it in the configs; both are undone at the end."""
        if not experts:
            yield
            return
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        known = {id(e.module): e for e in experts}

        def forward(module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return _experts_forward(module, known[id(module)], hidden, ids, weights)

        configs = {id(c): c for c in (cast(Any, e.module).config for e in experts)}
        before = {key: getattr(config, _IMPLEMENTATION) for key, config in configs.items()}
        ALL_EXPERTS_FUNCTIONS[_NAME] = forward
        try:
            for config in configs.values():
                setattr(config, _IMPLEMENTATION, _NAME)
            yield
        finally:
            for key, config in configs.items():
                setattr(config, _IMPLEMENTATION, before[key])
            del ALL_EXPERTS_FUNCTIONS[_NAME]


def _experts_forward(
    module: Any, experts: Experts, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """hidden [T, D], topk_ids [T, K], topk_weights [T, K] -> [T, D]."""
    ops = torch.ops.ep_fx
    rows, counts, order = ops.permute(hidden, topk_ids, experts.num_experts)
    routed, _, counts, indices, splits = ops.dispatch(rows, counts, None, experts.ep, experts.path)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return cast(torch.Tensor, ops.grouped_mm(x, getattr(module, name), counts, bias, not module.is_transposed))

    if module.has_gate:
        inner = module._apply_gate(linear(routed, "gate_up_proj"))
    else:
        inner = module.act_fn(linear(routed, "up_proj"))
    out = linear(inner, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    back = ops.combine(out, indices, splits, rows.shape[0], experts.path)
    return cast(torch.Tensor, ops.unpermute(back, order, topk_weights).to(hidden.dtype))
