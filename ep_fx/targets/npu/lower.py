"""`lower`: the table's rewrites on a copy of the verified joint graph, and everything moved to the device."""
from __future__ import annotations

from ep_fx.config import NpuOptions
from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.relocate import relocate
from ep_fx.targets.npu.table import TABLE, optional


def lower(graph: ParallelGraph, options: NpuOptions | None = None) -> ParallelGraph:
    """A copy of `graph` whose nodes call what runs on an NPU; `graph` stays as it is.

    Args:
        options: None: the defaults.
    """
    lowered = graph.copy()
    for lowering in (*TABLE, *optional(options or NpuOptions())):
        lowering.apply(lowered)
        lowered.remove_dead_code()
    relocate(lowered)
    lowered.graph.lint()
    return lowered
