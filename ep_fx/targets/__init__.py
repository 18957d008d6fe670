"""Lowering of graphs to what runs them: one folder or file per target, and how a graph is captured for it."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ep_fx.config import NpuOptions
from ep_fx.graph import ParallelGraph
from ep_fx.targets import npu
from ep_fx.targets.eager import Boxed, emit

TARGETS = ("cpu", "cuda", "npu")

__all__ = ["TARGETS", "Boxed", "capture_device", "capture_modes", "emit", "keeps_attention", "lower"]


def capture_device(target: str) -> torch.device:
    """The device of the fake tensors of a capture.

    For ``npu`` it is the CPU: torch_npu has kernels of its own for about 47 composite operators (matmul, softmax,
    one_hot, attention), so that a trace on its device would not consist of the operators that torch documents.
    """
    return torch.device("cpu" if target == "npu" else target)


@contextmanager
def capture_modes(target: str, device: str) -> Iterator[None]:
    """Autocast on the device of a capture as the caller has it on `device`, where the module runs.

    What is cast is by the list of operators that torch has for the device of the capture.
    """
    traced = capture_device(target).type
    if traced == device:
        yield
        return
    with torch.autocast(traced, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)):
        yield


def keeps_attention(target: str) -> bool:
    """Whether a capture for `target` keeps torch's attention as one operator of the dialect."""
    return target == "npu"


def lower(
    graph: ParallelGraph, target: str, options: NpuOptions | None = None, *, verify: bool = True
) -> ParallelGraph:
    """What is emitted of a verified graph: for ``npu`` a lowered copy, otherwise the graph itself.

    Args:
        options: of the target npu; None: its defaults.
        verify: hold the copy against the rule of the target.

    Raises:
        VerificationError: a kernel would get arguments that it does not take.
    """
    if target != "npu":
        return graph
    options = options or NpuOptions()
    lowered = npu.lower(graph, options)
    if verify:
        npu.check_target(lowered, options.soc).raise_if_broken()
    return lowered
