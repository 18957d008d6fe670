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

from ep_fx.capture.experts.base import Cut, Experts
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

    def cut(self, module: nn.Module, name: str) -> Cut | None:
        """By name and by the flags of the decorator: in ``gate_up_proj`` both halves are cut, interleaved or not."""
        owner = cast(Any, module)
        both = Cut(1, blocks=2) if getattr(owner, "is_concatenated", True) else Cut(1, each=2)
        into, out = (2, 1) if owner.is_transposed else (1, 2)
        cuts = {
            "gate_up_proj": both._replace(dim=into), "gate_up_proj_bias": both,
            "up_proj": Cut(into), "up_proj_bias": Cut(1), "down_proj": Cut(out), "down_proj_bias": None,
        }
        return cuts[name]

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

    def bias(name: str) -> torch.Tensor | None:
        return cast(torch.Tensor, getattr(module, f"{name}_bias")) if module.has_bias else None

    def linear(x: torch.Tensor, name: str, bias: torch.Tensor | None) -> torch.Tensor:
        return cast(torch.Tensor, ops.grouped_mm(x, getattr(module, name), counts, bias, not module.is_transposed))

    routed = experts.enter(routed)
    if module.has_gate:
        inner = module._apply_gate(linear(routed, "gate_up_proj", bias("gate_up_proj")))
    else:
        inner = module.act_fn(linear(routed, "up_proj", bias("up_proj")))
    last = bias("down_proj")
    out = experts.leave(linear(inner, "down_proj", last if experts.tp == 1 else None))
    if last is not None and experts.tp > 1:  # once, and not on every rank that holds a part
        out = ops.add_bias(out, last, counts)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    back = ops.combine(out, indices, splits, rows.shape[0], experts.path)
    return cast(torch.Tensor, ops.unpermute(back, order, topk_weights).to(hidden.dtype))
