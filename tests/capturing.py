"""The graph of a model as captured, before any pass."""
from __future__ import annotations

from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import ep_fx
from ep_fx import EPModule, api
from ep_fx.graph import ParallelGraph


def captured(model: nn.Module, mesh: DeviceMesh, *inputs: Any, **options: Any) -> tuple[EPModule, ParallelGraph]:
    """The transformed module, and a copy of its graph from before the passes."""
    graphs: list[ParallelGraph] = []
    build = api.build_graph

    def keep(*args: Any) -> ParallelGraph:
        graph = build(*args)
        graphs.append(graph.copy())
        return graph

    with mock.patch.object(api, "build_graph", keep):
        module = ep_fx.transform(model, mesh, example_inputs=inputs, **options)
    return module, graphs[-1]
