"""Form 5 for the experts of transformers that do not carry ``use_experts_implementation``: one function a class.

Each says what the class's own forward computes, in terms of `moe`; `BUILT_IN` finds it by the class's name, so that
nothing is imported here. What cannot be said so is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ep_fx.capture.experts.module_list.rows import expert_of_rows
from ep_fx.ops.moe import moe


@dataclass(frozen=True)
class Registration:
    """How to trace the instances of a class.

    Args:
        forward: called with the module and the arguments of its forward.
        parameters: names of the experts' parameters in the module; None: those whose dim 0 counts the experts.
        count: name of the attribute that counts the experts.
        refuses: the reason, for a module and a number of ep ranks, why it cannot be; None: it can.
    """

    forward: Callable[..., Any]
    parameters: tuple[str, ...] | None = None
    count: str = "num_experts"
    refuses: Callable[[nn.Module, int], str | None] = lambda module, ep: None


def _product(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return cast(Tensor, torch.ops.ep_fx.grouped_mm(x, weight, counts, None, transposed))


def _llama4(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert sees every token times its score, which is 0 where it was not chosen; an expert takes 0 to 0."""
    hidden = hidden.reshape(-1, module.hidden_dim)
    scores, logits = module.router(hidden)
    ids = logits.topk(module.top_k, dim=1).indices
    experts = module.experts

    def rows(x: Tensor, counts: Tensor) -> Tensor:
        gate, up = _product(x, experts.gate_up_proj, counts, False).chunk(2, dim=-1)
        return _product(up * experts.act_fn(gate), experts.down_proj, counts, False)

    weighted = (hidden.unsqueeze(1) * scores.gather(1, ids).unsqueeze(-1)).reshape(-1, module.hidden_dim)
    choices = ids.reshape(-1, 1)
    routed = moe(weighted, choices, torch.ones_like(choices, dtype=weighted.dtype), rows, module.num_experts)
    routed = routed.reshape(-1, module.top_k, module.hidden_dim).sum(1)
    return module.shared_expert(hidden) + routed, logits


def _dbrx(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The experts' matrices stand below each other in three parameters [E * F, D]."""
    mlp, width = module.mlp, module.ffn_hidden_size

    def rows(x: Tensor, counts: Tensor) -> Tensor:
        w1, v1, w2 = (w.view(-1, width, module.hidden_size) for w in (mlp.w1, mlp.v1, mlp.w2))
        inner = mlp.activation_fn(_product(x, w1, counts, True)) * _product(x, v1, counts, True)
        return _product(inner, w2, counts, False)

    tokens = hidden.reshape(-1, module.hidden_size)
    return moe(tokens, ids, weights, rows, module.num_experts).view(hidden.shape)


def _step3p7(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    def rows(x: Tensor, counts: Tensor) -> Tensor:
        gated = module._apply_gate(_product(x, module.gate_up_proj, counts, True))
        return _product(gated, module.down_proj, counts, True)

    return moe(hidden, ids, weights, rows, module.num_experts)


def _longcat(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    def rows(x: Tensor, counts: Tensor) -> Tensor:
        gate, up = _product(x, module.gate_up_proj, counts, True).chunk(2, dim=-1)
        return _product(module.act_fn(gate) * up, module.down_proj, counts, True)

    return moe(hidden, ids, weights, rows, module.num_routed_experts)


def _longcat_refuses(module: Any, ep: int) -> str | None:
    if not module.zero_expert_num:
        return None
    return (
        f"gate_up_proj has {module.total_experts} rows, {module.zero_expert_num} of them for experts without weights, "
        f"and down_proj has {module.num_routed_experts}: they are not parameters of the same experts; accepted: "
        "zero_expert_num=0"
    )


def _doge(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """An expert is a row to multiply the token with, and a row to scale by the activated product."""
    batch, length, dim = hidden.shape
    logits = module.router_gate(hidden).reshape(-1).view(2, batch * length, module.num_keys)
    (x_scores, y_scores), (x_ids, y_ids) = logits.topk(module.num_keys, dim=-1)
    scores = (x_scores.unsqueeze(-1) + y_scores.unsqueeze(-2)).flatten(-2)
    pairs = (x_ids.unsqueeze(-1) * module.num_keys + y_ids.unsqueeze(-2)).flatten(-2)
    scores, places = scores.topk(module.top_k, dim=-1)
    weights = scores.softmax(-1)
    if module.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)

    def rows(x: Tensor, counts: Tensor) -> Tensor:
        of_row = expert_of_rows(x, counts).clamp(max=counts.shape[0] - 1)
        down, up = (table.weight.index_select(0, of_row) for table in (module.down_embed, module.up_embed))
        return cast(Tensor, module.act_fn((x * down).sum(-1, keepdim=True)) * up)

    routed = moe(hidden.view(-1, dim), pairs.gather(-1, places), weights, rows, module.num_experts)
    shared = module.down_proj(module.act_fn(module.gate_proj(hidden)) * module.up_proj(hidden))
    return shared + routed.view(batch, length, dim), logits


def _switch(module: Any, hidden: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
    """`selected` [T, 1, E] holds at most one 1 a token; none where the expert's capacity was reached."""
    is_routed = selected.sum(-1) > 0
    ids = torch.where(is_routed, selected.argmax(-1), module.num_experts)
    return moe(hidden, ids, weights, module.stacked, module.num_experts)


def _nllb(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The forward reads every entry of `ids` [T, K] as the number of an expert."""
    rate = module.moe_token_dropout

    def rows(x: Tensor, counts: Tensor) -> Tensor:
        y = module.stacked(x, counts)
        if rate == 0:
            return cast(Tensor, y)
        return cast(Tensor, module.token_dropout(y) if module.training else y * (1 - rate))

    return moe(hidden, ids, weights, rows, module.num_experts)


def _vitpose(module: Any, hidden: Tensor, indices: Tensor) -> Tensor:
    """All tokens of a picture go to one expert."""
    batch, length, width = hidden.shape
    ids = indices.reshape(-1, 1).expand(batch, length).reshape(-1, 1)
    ones = torch.ones_like(ids, dtype=hidden.dtype)
    return moe(hidden.reshape(-1, width), ids, ones, module.stacked, module.num_experts).view(batch, length, -1)


def _never(module: nn.Module, *args: Any) -> Any:
    raise AssertionError("refused before")


def _jetmoe_refuses(module: nn.Module, ep: int) -> str:
    return (
        "attention experts are two products, with the attention itself between them: what was sent to the experts "
        "would have to come back and be sent again, for which there is no form"
    )


def _in(family: str, name: str) -> str:
    return f"transformers.models.{family}.modeling_{family}.{name}"


_LLAMA4 = ("experts.gate_up_proj", "experts.down_proj")
BUILT_IN: dict[str, Registration] = {
    _in("llama4", "Llama4TextMoe"): Registration(_llama4, _LLAMA4),
    _in("dbrx", "DbrxExperts"): Registration(_dbrx, ("mlp.w1", "mlp.v1", "mlp.w2")),
    _in("step3p7", "Step3p7Experts"): Registration(_step3p7),
    _in("longcat_flash", "LongcatFlashExperts"): Registration(
        _longcat, count="num_routed_experts", refuses=_longcat_refuses
    ),
    _in("doge", "DogeCDMoE"): Registration(_doge, ("down_embed.weight", "up_embed.weight")),
    _in("switch_transformers", "SwitchTransformersExperts"): Registration(_switch),
    _in("nllb_moe", "NllbMoeExperts"): Registration(_nllb),
    _in("vitpose_backbone", "VitPoseNaiveMoe"): Registration(_vitpose),
    _in("jetmoe", "JetMoeMoA"): Registration(_never, refuses=_jetmoe_refuses),
}
"""By the full name of the class."""
