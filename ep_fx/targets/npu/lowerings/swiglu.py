"""SwiGLU of the two halves of one tensor, forward and backward, by one kernel each.

    g, u = split(x)   y = silu(g) * u                              ->    y = npu_swiglu(x)
    dx = cat([silu_backward(dy * u, g), dy * silu(g)])             ->    dx = npu_swiglu_backward(dy, x)

Gate and up that lie interleaved, or the other way round, stay as they are: ATen.
"""
from __future__ import annotations

from torch import fx

from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import activation as kernels
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.edit import value_of
from ep_fx.targets.npu.lowerings.patterns import SwiGLU, gradients, joined, swiglus, whole_of

_NAME = "swiglu"


def _apply(graph: ParallelGraph) -> None:
    for found in swiglus(graph):
        whole = whole_of(found.gate, found.up)
        if whole is None:
            continue
        reason = checked(kernels.npu_swiglu, (whole,)).reason
        if reason is not None:
            keep(found.silu, _NAME, reason)
            continue
        _backward(graph, found, whole)
        with graph.graph.inserting_before(found.product):
            product = graph.call(kernels.npu_swiglu, whole, like=found.product, value=value_of(found.product))
        found.product.replace_all_uses_with(product)


def _backward(graph: ParallelGraph, found: SwiGLU, whole: fx.Node) -> None:
    for gradient in gradients(found):
        for joint in joined(gradient.of_gate, gradient.of_up):
            with graph.graph.inserting_before(joint):
                arguments = (gradient.of_product, whole)
                lowered = graph.call(kernels.npu_swiglu_backward, *arguments, like=joint, value=value_of(joint))
            joint.replace_all_uses_with(lowered)


SWIGLU = Lowering(
    name=_NAME,
    takes="aten.silu times the other half, and its backward",
    emits=("npu_swiglu", "npu_swiglu_backward"),
    fallback="aten.silu, mul, silu_backward",
    source="aclnnSwiGlu, aclnnSwiGluGrad",
    apply=_apply,
)
