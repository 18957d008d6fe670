"""Lowering of graphs to what runs them: one folder or file per target, and how a graph is captured for it."""
from __future__ import annotations

import torch

from ep_fx.graph import ParallelGraph
from ep_fx.targets import npu
from ep_fx.targets.eager import Boxed, emit

TARGETS = ("cpu", "cuda", "npu")

__all__ = ["TARGETS", "Boxed", "capture_device", "emit", "keeps_attention", "lower"]


def capture_device(target: str) -> torch.device:
    """The device of the fake tensors of a capture.

    For ``npu`` it is the CPU: torch_npu has kernels of its own for about 47 composite operators (matmul, softmax,
    one_hot, attention), so that a trace on its device would not consist of the operators that torch documents.
    """
    return torch.device("cpu" if target == "npu" else target)


def keeps_attention(target: str) -> bool:
    """Whether a capture for `target` keeps torch's attention as one operator of the dialect."""
    return target == "npu"


def lower(graph: ParallelGraph, target: str, *, verify: bool = True) -> ParallelGraph:
    """What is emitted of a verified graph: for ``npu`` a lowered copy, otherwise the graph itself.

    Args:
        verify: hold the copy against the rule of the target.

    Raises:
        VerificationError: a kernel would get arguments that it does not take.
    """
    if target != "npu":
        return graph
    lowered = npu.lower(graph)
    if verify:
        npu.check_target(lowered).raise_if_broken()
    return lowered
