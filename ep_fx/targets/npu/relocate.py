"""Device arguments of a graph that was captured on CPU, moved to the NPU. Recorded values stay CPU fakes."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph


def relocate(graph: ParallelGraph) -> None:
    """Every ``cpu`` among the arguments of `graph` becomes ``"npu"``, in place.

    As a string: without torch_npu torch knows no device of this name, and a lowered graph can be looked at everywhere.
    """
    for node in graph:
        if node.op == "call_function":
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _moved)


def _moved(value: Any) -> Any:
    return "npu" if isinstance(value, torch.device) and value.type == "cpu" else value
