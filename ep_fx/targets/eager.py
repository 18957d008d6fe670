"""Emit graphs for PyTorch's own eager kernels: CPU and CUDA run the dialect as it is, with one change.

Some kernels lay out their results otherwise than their fake twins said (softplus_backward, padding that only cuts), so
a view that was traced where eager would copy may not exist: views are emitted as ``reshape``, which copies if it must.

Private torch API used here: ``_BoxedCodeGen``, by which the generated code takes its arguments from a list that it
empties, so that each saved value is freed at its last use in backward; ``_AutoDispatchBelowAutograd``: the graph was
traced below autograd and holds its own backward, so each operator need not pass through autograd again.

An error in a run carries a note that names the node, its module and the line of the model's source.
"""
from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from ep_fx.graph import info_of, target_name
from ep_fx.graph.aliases import Aliases
from ep_fx.graph.effects import written_by

aten = torch.ops.aten
Boxed = Callable[[list[Any]], Any]


def emit(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> Boxed:
    """A function of one list of arguments, which it empties, that runs `graph`.

    Args:
        constants: tensors that ``get_attr`` nodes name.
    """
    _let_views_copy(graph)
    graph.set_codegen(_BoxedCodeGen())
    named = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    module = fx.GraphModule({name: constants[name] for name in named}, graph)
    code, source = module.forward, type(module).forward.__code__
    nodes = {node.name: node for node in graph.nodes}

    def run(arguments: list[Any]) -> Any:
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return code(arguments)
        except Exception as error:
            if (node := nodes.get(_failed(error, source))) is not None:
                info = info_of(node)
                error.add_note(
                    f"raised by %{node.name} = {target_name(node)}, {info.phase.value}, module {info.fqn or 'root'!r} "
                    f"({info.source or 'source unknown'})"
                )
            raise

    return run


def _failed(error: Exception, source: CodeType) -> str:
    """Name of the node whose line in the generated code raised; "" where it cannot be told."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code is not source:
        frame = frame.tb_next
    if frame is None:
        return ""
    line = linecache.getline(source.co_filename, frame.tb_lineno)  # torch.fx registers its code there
    return line.partition("=")[0].partition(":")[0].strip()


def _let_views_copy(graph: fx.Graph) -> None:
    """Every view whose memory nobody writes becomes a reshape; a write must reach all who share the memory."""
    aliases = Aliases(graph.nodes)
    written = {memory for node in graph.nodes for value in written_by(node) for memory in aliases.memory(value)}
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        if written.isdisjoint(aliases.memory(node)):
            node.target = aten.reshape.default
