"""A computation in the dialect, forward and backward in one graph: as it is on the CPU, and lowered on the device."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ep_fx.graph import Manifest, MeshSpec, ParallelGraph
from ep_fx.targets.npu import lower
from ep_fx.targets.npu.aten import listed
from ep_fx.targets.npu.kernels import COMPOSITIONS, KERNELS
from ep_fx.testing.npu import only, recorded

Run = Callable[..., Any]


def traced(run: Run, *inputs: Tensor) -> ParallelGraph:
    """The graph of `run`, which computes gradients itself, for inputs of these sizes."""
    module = make_fx(run, tracing_mode="fake")(*inputs)
    return graph_of(module.graph)


def graph_of(graph: fx.Graph, constants: dict[str, Tensor] | None = None) -> ParallelGraph:
    """A graph of no model: its Manifest is empty."""
    return ParallelGraph(graph, Manifest(MeshSpec({}, {}), (), (), (), (), 0, ()), constants)


def record(graph: ParallelGraph, *inputs: Tensor) -> None:
    """Records the values of all nodes, for inputs of these sizes; sizes from within are unknown."""
    with FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True)) as mode:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        _Recorder(fx.GraphModule({}, graph.graph)).run(*fakes)


class _Recorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = value = super().run_node(n)
        return value


def on_device(graph: ParallelGraph, *inputs: Tensor) -> tuple[list[Tensor], dict[str, int]]:
    """What the lowered `graph` gives on the device, on the CPU again, and the kernels it called.

    Raises:
        ForbiddenError: an operator of ATen ran for which torch_npu has no kernel, and PyTorch no composition.
    """
    lowered = lower(graph)
    module = fx.GraphModule({}, lowered.graph)
    arguments = [x.to("npu") for x in inputs]
    device = only(listed("aten_ops") | listed("aten_compositions"))
    with recorded() as calls, device, torch._C._AutoDispatchBelowAutograd():
        results = module(*arguments)
    found = {name.removeprefix("npu::"): count for name, count in calls.items() if name.startswith("npu::")}
    return [_checked(result) for result in _flat(results)], found


def on_cpu(graph: ParallelGraph, *inputs: Tensor) -> list[Tensor]:
    """What `graph` gives by the dialect's own kernels."""
    with torch._C._AutoDispatchBelowAutograd():
        return _flat(fx.GraphModule({}, graph.graph)(*inputs))


def targets(graph: ParallelGraph) -> set[str]:
    """Names of the functions of the target that the lowered `graph` calls."""
    known = {id(function): name for name, function in (KERNELS | COMPOSITIONS).items()}
    return {known[id(node.target)] for node in lower(graph) if id(node.target) in known}


def _flat(results: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _checked(result: Tensor) -> Tensor:
    assert result.device.type == "npu"
    return result.cpu()


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """Relative error of each result, infinite where shape or dtype differ."""
    return [_error(a, b) for a, b in zip(found, wanted, strict=True)]


def _error(found: Tensor, wanted: Tensor) -> float:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return float("inf")
    difference = (found.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp(min=1e-12))
