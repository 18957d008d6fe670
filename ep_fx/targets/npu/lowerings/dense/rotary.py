"""Rotary embeddings of queries and keys, forward and backward, to ``npu_rotary_mul`` and ``npu_rotary_mul_backward``.

The gradient of a rotation needs the angles only, not what was rotated, so that each direction is found for itself. The
angles must have no gradient of their own: then somebody reads the parts of the rotation, and it stays.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels.rotary import npu_rotary_mul, npu_rotary_mul_backward
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.dense.examples import ROTARY_HALVES, ROTARY_PAIRS
from ep_fx.targets.npu.lowerings.dense.shapes import pattern_shape, twin
from ep_fx.targets.npu.patterns import Example, Match, Pattern, find, place, replace, trace

aten = torch.ops.aten
_NAME = "rotary"
_SEARCHES: tuple[tuple[Example, str, Any], ...] = (
    (ROTARY_HALVES, "result", aten.neg.default),
    (ROTARY_HALVES, "grad_x", aten.neg.default),
    (ROTARY_PAIRS, "result", aten.sub.Tensor),
    (ROTARY_PAIRS, "grad_x", aten.neg.default),
)
"""Which output of which example, and the operator that the search begins at: its results are half as wide as x."""
_BOUNDED = (aten.cos.default, aten.sin.default)
_SAME_RANGE = (
    aten.unsqueeze.default, aten.slice.Tensor, aten._to_copy.default, aten.expand.default, aten.view.default,
    aten.transpose.int, aten.clone.default,
)


def _apply(graph: ParallelGraph) -> None:
    for example, output, target in _SEARCHES:
        for node in [n for n in graph if n.target is target]:
            if (shape := _whole_shape(node)) is None:
                continue
            pattern = trace(example, shape, node.meta["val"].dtype).only(output)
            match = find(pattern, node)
            reason = _rewrite(graph, pattern, match, output, example) if isinstance(match, Match) else match
            if reason is not None:
                keep(node, _NAME, reason)


def _whole_shape(node: fx.Node) -> tuple[int | None, ...] | None:
    """The shape of what is rotated, where `node` may be half of it."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not isinstance(value.shape[3], int):
        return None
    return (*pattern_shape(value)[:3], 2 * value.shape[3]) if value.is_floating_point() else None


def _rewrite(graph: ParallelGraph, pattern: Pattern, match: Match, output: str, example: Example) -> str | None:
    pairs, backward = example is ROTARY_PAIRS, output != "result"
    x, cos, sin = (match.inputs[name][0] for name in ("grad" if backward else "x", "cos", "sin"))
    kernel: Any = npu_rotary_mul_backward if backward else npu_rotary_mul
    if (broken := _out_of_range(cos, sin) or checked(kernel, (x, cos, sin, pairs)).reason) is not None:
        return broken
    at = place(pattern, match, [output], [x, cos, sin])
    if isinstance(at, str):
        return at
    like = match.nodes[pattern.outputs[output][0]]
    with graph.graph.inserting_before(at):
        call = graph.call(kernel, x, cos, sin, pairs, like=like, value=twin(x.meta["val"]))
    replace(graph, pattern, match, {output: call})
    return None


def _out_of_range(*angles: fx.Node) -> str | None:
    """The kernel is specified for factors within [-1, 1]. Those that are scaled beyond are refused; of those that come
    from outside the graph nothing is known, and they are taken to be cosines and sines."""
    for angle in angles:
        node, factor = angle, 1.0
        while node.op == "call_function" and node.target not in _BOUNDED:
            source = node.args[0]
            if node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(node.args[1], (int, float)):
                factor *= abs(node.args[1])
            elif node.target not in _SAME_RANGE:
                break
            if not isinstance(source, fx.Node):
                break
            node = source
        if factor > 1:
            return f"%{angle.name} is scaled by {factor}, and the kernel takes factors within [-1, 1]"
    return None


ROTARY = Lowering(
    name=_NAME,
    takes="rotary embeddings in the form of rotate_half, and of neighbouring pairs (DeepSeek-V3)",
    emits=("npu_rotary_mul", "npu_rotary_mul_backward"),
    fallback="the operators of ATen that it is written in; in the kernel, beyond what it takes of heads and sequences",
    source="torch_npu 2.13.0 _op_plugin_docs.py, npu_rotary_mul",
    apply=_apply,
)
