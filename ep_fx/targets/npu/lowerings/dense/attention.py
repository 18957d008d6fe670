"""``ep_fx::attention`` and its backward to ``npu_fusion_attention`` and ``npu_fusion_attention_grad``.

A boolean mask is turned round once for all layers that share it; causal ones share one packed triangle. Masks of floats
stay with the dialect's kernel: the texts on the operator's pse differ in whether it is scaled with the scores.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, target_name
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels.attention import PACKED, npu_fusion_attention, npu_fusion_attention_grad
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.dense.shapes import evaluated

aten = torch.ops.aten
_NAME = "attention"
_Masks = tuple[fx.Node | None, fx.Node | None]


def _apply(graph: ParallelGraph) -> None:
    lowered: dict[fx.Node, _Masks] = {}
    made: dict[fx.Node | None, _Masks] = {}
    for node in list(graph):
        if target_name(node) == "ep_fx::attention":
            query, key, value, mask, is_causal, scale = node.args
            if (reason := _reason(query, key, value, mask, scale)) is not None:
                keep(node, _NAME, reason)
                continue
            masks = _masks(graph, node, mask, bool(is_causal), made)
            new = _replace(graph, node, npu_fusion_attention, (query, key, value, *masks, is_causal, scale))
            lowered[new] = masks
        elif target_name(node) == "ep_fx::attention_backward":
            grad, query, key, value, _, output, highest, total, is_causal, scale = node.args
            forward = highest.args[0]  # type: ignore[union-attr]
            if forward not in lowered:
                keep(node, _NAME, "so is its forward")
                continue
            masks = lowered[forward]  # type: ignore[index]
            args = (grad, query, key, value, *masks, output, highest, total, is_causal, scale)
            _replace(graph, node, npu_fusion_attention_grad, args)


def _reason(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> str | None:
    """Why the kernel is not called."""
    if mask is not None and mask.meta["val"].dtype is not torch.bool:
        return "its mask is added to the scores, and whether pse is scaled with them differs from text to text"
    if value.meta["val"].shape[3] > key.meta["val"].shape[3]:
        return "its values are wider than its keys"
    return checked(npu_fusion_attention, (query, key, value, None, None, False, scale)).reason


def _masks(
    graph: ParallelGraph, node: fx.Node, mask: Any, is_causal: bool, made: dict[fx.Node | None, _Masks]
) -> _Masks:
    """The nodes `masked` and `unseen` of an attention; made where the first of those that share them needs them."""
    if mask is None and not is_causal:
        return None, None
    if mask not in made:
        with graph.graph.inserting_before(node):
            made[mask] = (_triangle(graph, node), None) if mask is None else _turned_round(graph, node, mask)
    return made[mask]


def _triangle(graph: ParallelGraph, like: fx.Node) -> fx.Node:
    made = {"dtype": torch.bool, "device": torch.device("cpu")}
    ones = evaluated(graph, aten.ones.default, [PACKED, PACKED], like=like, **made)
    return evaluated(graph, aten.triu.default, ones, 1, like=like)


def _turned_round(graph: ParallelGraph, like: fx.Node, mask: fx.Node) -> _Masks:
    for _ in range(4 - mask.meta["val"].dim()):
        mask = evaluated(graph, aten.unsqueeze.default, mask, 0, like=like)
    masked = evaluated(graph, aten.logical_not.default, mask, like=like)
    return masked, evaluated(graph, aten.all.dim, masked, -1, True, like=like)


def _replace(graph: ParallelGraph, node: fx.Node, kernel: Any, args: tuple[Any, ...]) -> fx.Node:
    with graph.graph.inserting_before(node):
        new = graph.call(kernel, *args, like=node, value=node.meta.get("val"))
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)
    return new


ATTENTION = Lowering(
    name=_NAME,
    takes="ep_fx::attention, ep_fx::attention_backward",
    emits=("npu_fusion_attention", "npu_fusion_attention_grad"),
    fallback="the dialect's kernel, which is made of products and exponentials of ATen",
    source="torch_npu 2.13.0 _op_plugin_docs.py, npu_fusion_attention",
    apply=_apply,
)
