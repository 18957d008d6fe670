"""RMS norms, forward and backward, to ``npu_rms_norm`` and ``npu_rms_norm_backward``.

Found from each reciprocal root: which form it is, and which gradients there are of it. Where only the forward would be
taken out of a form whose gradients stay, both stay: the gradients read what the kernel does not give.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels.norm import npu_rms_norm, npu_rms_norm_backward
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.dense.examples import NORMS
from ep_fx.targets.npu.lowerings.dense.shapes import evaluated, pattern_shape, twin
from ep_fx.targets.npu.patterns import Match, Pattern, find, place, replace, trace

aten = torch.ops.aten
_NAME = "rms_norm"
_GRADIENTS = (("grad_x", "grad_weight"), ("grad_x",), ("grad_weight",), ())
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _apply(graph: ParallelGraph) -> None:
    for root in [node for node in graph if node.target is aten.rsqrt.default]:
        if (reason := _lower(graph, root)) is not None:
            keep(root, _NAME, reason)


def _lower(graph: ParallelGraph, root: fx.Node) -> str | None:
    """Rewrites the norm that has `root`; why it does not, otherwise."""
    x = _normalised_by(root)
    if x is None:
        return "not one of the known forms: no mean of squares"
    value, reason = x.meta["val"], None
    if value.dtype not in _FLOATS:
        return f"{value.dtype} is not one of {_FLOATS}"
    for example in NORMS:
        whole = trace(example, pattern_shape(value), value.dtype)
        for gradients in _GRADIENTS:
            pattern = whole.only("result", *gradients)
            match = find(pattern, root)
            if isinstance(match, Match):
                return _rewrite(graph, pattern, match, gradients, root)
            reason = reason or match
    return reason or "not one of the known forms, or its gradient is not"


def _normalised_by(root: fx.Node) -> fx.Node | None:
    """What is normalised by `root`, where that is made of a mean of squares."""
    node: Any = root
    for _ in range(2):
        node = node.args[0] if node.args else None
        if not isinstance(node, fx.Node):
            return None
    if node.target is not aten.mean.dim or not isinstance(node.args[0], fx.Node):
        return None
    squares = node.args[0]
    wide: Any = squares.args[0] if squares.args else None
    if not isinstance(wide, fx.Node):
        return None
    return wide.all_input_nodes[0] if wide.target is aten._to_copy.default else wide


def _rewrite(
    graph: ParallelGraph, pattern: Pattern, match: Match, gradients: tuple[str, ...], root: fx.Node
) -> str | None:
    x, weight, epsilon = match.inputs["x"][0], match.inputs["weight"], match.numbers["epsilon"]
    if (broken := checked(npu_rms_norm, (x, weight[0], epsilon)).reason) is not None:
        return broken
    forward = place(pattern, match, ["result"], [x, min(weight)])
    if isinstance(forward, str):
        return forward
    backward: Any = None
    if gradients:
        grad = match.inputs["grad"][0]
        backward = place(pattern, match, gradients, [grad, x, max(weight)])
        if isinstance(backward, str):
            return backward
    outputs, rstd = _forward(graph, pattern, match, forward, (x, min(weight), epsilon), root)
    if gradients:
        outputs |= _backward(graph, pattern, match, backward, (grad, x, max(weight), rstd))
    replace(graph, pattern, match, {name: outputs[name] for name in pattern.outputs})
    return None


def _forward(
    graph: ParallelGraph, pattern: Pattern, match: Match, at: fx.Node, args: tuple[Any, ...], root: fx.Node
) -> tuple[dict[str, fx.Node], fx.Node]:
    result = match.nodes[pattern.outputs["result"][0]]
    values = (result.meta["val"], root.meta["val"])
    with graph.graph.inserting_before(at):
        call = graph.call(npu_rms_norm, *args, like=result, value=values)
        y, rstd = (graph.call(operator.getitem, call, i, like=result, value=v) for i, v in enumerate(values))
    return {"result": y}, rstd


def _backward(
    graph: ParallelGraph, pattern: Pattern, match: Match, at: fx.Node, args: tuple[fx.Node, ...]
) -> dict[str, fx.Node]:
    """Both gradients; that of the weight in fp32 from the kernel, then in its own dtype."""
    _, x, weight, _ = args
    some = next(match.nodes[terms[0]] for name, terms in pattern.outputs.items() if name != "result")
    wide = twin(weight.meta["val"], torch.float32)
    values = (twin(x.meta["val"]), wide)
    with graph.graph.inserting_before(at):
        call = graph.call(npu_rms_norm_backward, *args, like=some, value=values)
        dx, dw = (graph.call(operator.getitem, call, i, like=some, value=v) for i, v in enumerate(values))
        if weight.meta["val"].dtype is not torch.float32:
            dw = evaluated(graph, aten._to_copy.default, dw, like=some, dtype=weight.meta["val"].dtype)
    return {"grad_x": dx, "grad_weight": dw}


RMS_NORM = Lowering(
    name=_NAME,
    takes="RMS norms with a weight, in the forms of transformers and of torch",
    emits=("npu_rms_norm", "npu_rms_norm_backward"),
    fallback="the operators of ATen that it is written in",
    source="torch_npu 2.13.0 _op_plugin_docs.py, npu_rms_norm; docs of aclnnRmsNorm, aclnnRmsNormGrad",
    apply=_apply,
)
