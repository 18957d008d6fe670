"""What is emitted, run on fake npu tensors: the Meta kernels of torch_npu say what each node gives.

Nothing is computed and no rank beside this one exists, so sizes are those of a real model on a real cluster. What a
node gives is held to what the capture on CPU fakes recorded for it, dtype and size by size.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ep_fx.graph import ParallelGraph
from ep_fx.runtime import Program


class _Compared(fx.Interpreter):
    """Runs every node; collects those that give another dtype or size than was recorded."""

    def __init__(self, graph: ParallelGraph) -> None:
        constants = {name: value.to("npu") for name, value in graph.constants.items()}
        super().__init__(fx.GraphModule(constants, graph.graph))
        self.wrong: list[str] = []
        self.nodes = 0
        self._sizes: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and "val" in n.meta:
            self.nodes += 1
            got, recorded = list(_tensors(result)), list(_tensors(n.meta["val"]))
            off = [x for x in got if x.device.type != "npu"]
            if len(got) != len(recorded) or off or not all(map(self._same, got, recorded)):
                self.wrong.append(f"%{n.name} = {n.target}: {_described(got)}, recorded {_described(recorded)}")
        return result

    def _same(self, got: Tensor, recorded: Tensor) -> bool:
        """Numbers are equal; a size that is not known in advance here is one there, always the same one."""
        sizes = [(str(one), str(other)) for one, other in zip(got.shape, recorded.shape, strict=False)]
        equal = (a == b if a.isdigit() else self._sizes.setdefault(a, b) == b for a, b in sizes)
        return got.dtype is recorded.dtype and got.dim() == recorded.dim() and all(equal)


def _tensors(value: Any) -> Iterator[Tensor]:
    yield from (part for part in torch.utils._pytree.tree_leaves(value) if isinstance(part, Tensor))


def _described(tensors: list[Tensor]) -> str:
    return ", ".join(f"{x.dtype} {[str(size) for size in x.shape]} on {x.device.type}" for x in tensors)


def run_nodes(graph: ParallelGraph) -> tuple[int, list[str]]:
    """Runs `graph`, forward and backward, on fake npu tensors of the recorded types.

    Returns:
        how many nodes were compared, and those that gave something else than was recorded, as text.
    """
    with _fakes(), torch.no_grad():
        interpreter = _Compared(graph)
        interpreter.run(*_like(graph))
    return interpreter.nodes, interpreter.wrong


def run_emitted(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    """Runs the two emitted functions of `program` on fake npu tensors.

    Returns:
        parameters that are trained, and their gradients.
    """
    manifest = program.graph.manifest
    assert program.backward is not None
    with _fakes(), torch.no_grad():
        given = _like(program.lowered)
        count = len(given) - len(manifest.tangents)
        _, saved = program.forward(given[:count])
        gradients, _ = program.backward([*saved, *(given[i] for i in program.backward_inputs)])
    trained = [x for x, spec in zip(given, manifest.parameters, strict=False) if spec.trainable]
    return trained, gradients


def _fakes() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # constants of the graph are real


def _like(graph: ParallelGraph) -> list[Tensor]:
    """Parameters (local shards), buffers, inputs and tangents, as recorded but on the device."""
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return [torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="npu") for x in values]
