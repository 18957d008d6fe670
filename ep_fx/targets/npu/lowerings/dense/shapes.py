"""Recorded values of new nodes, and shapes by which patterns are traced."""
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from ep_fx.graph import ParallelGraph


def pattern_shape(tensor: Tensor) -> tuple[int | None, ...]:
    """The sizes of `tensor`, None where one is free: a pattern has the same constants as what it is to be found in."""
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)


def twin(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous fake tensor of the sizes of `tensor`, of another dtype where one is given."""
    with detect_fake_mode([tensor]) or nullcontext():
        return tensor.new_empty(tensor.shape, dtype=dtype or tensor.dtype)


def evaluated(graph: ParallelGraph, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """A new call at the graph's insertion point, with what it gives for the recorded values of its arguments."""
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    with detect_fake_mode(like.meta["val"]) or nullcontext():
        node = graph.call(target, *args, like=like, value=target(*values, **kwargs))
    node.kwargs = kwargs
    return node
