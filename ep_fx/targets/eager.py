"""Emit graphs for PyTorch's own eager kernels: CPU and CUDA run the dialect as it is.

Private torch API used here: ``_BoxedCodeGen``, by which the generated code takes its arguments from a list that it
empties, so that each saved value is freed at its last use in backward; ``_AutoDispatchBelowAutograd``: the graph was
traced below autograd and holds its own backward, so each operator need not pass through autograd again.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

Boxed = Callable[[list[Any]], Any]


def emit(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> Boxed:
    """A function of one list of arguments, which it empties, that runs `graph`.

    Args:
        constants: tensors that ``get_attr`` nodes name.
    """
    graph.set_codegen(_BoxedCodeGen())
    named = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    module = fx.GraphModule({name: constants[name] for name in named}, graph)
    code = module.forward

    def run(arguments: list[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return code(arguments)

    return run
