"""Two forwards of one module in the order dispatch 0, dispatch 1, combine 0, combine 1: node by node, at will.

`EPModule` itself runs one graph at a time; here its forward graph is interpreted for every micro-batch, all of them
stopped at the same node before any goes on, which is the hardest order that a scheduler could choose.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ep_fx import EPModule
from ep_fx.graph import split


def interleaved_forwards(module: EPModule, batches: Sequence[tuple[Tensor, ...]]) -> tuple[list[Tensor], list[str]]:
    """First output of `module` for each of `batches`, and the order in which exchanges were reached."""
    module.prepare(*batches[0])
    graph = module.graph
    half = split(graph).forward
    owner = fx.GraphModule(graph.constants, half)
    buffers = dict(module.named_buffers())
    state = [p.to_local().detach() for p in module._ordered()]  # type: ignore[attr-defined]
    state += [buffers[b.name] for b in graph.manifest.buffers]
    runs = [_Run(owner, [*state, *batch]) for batch in batches]
    order: list[str] = []
    for stop in (_LAST_OF_DISPATCH, _LAST_OF_COMBINE):
        for index, run in enumerate(runs):
            run.advance(stop)
            order.append(f"{'dispatch' if stop is _LAST_OF_DISPATCH else 'combine'} {index}")
    with torch.no_grad():
        return [run.finish()[0][0] for run in runs], order


_LAST_OF_DISPATCH = (torch.ops.ep_fx.regroup.default, torch.ops.ep_fx.dispatch.default)
_LAST_OF_COMBINE = (torch.ops.ep_fx.pad_rows.default, torch.ops.ep_fx.combine.default)


class _Run:
    """One micro-batch on its way through the forward graph."""

    def __init__(self, owner: fx.GraphModule, arguments: Sequence[Tensor]) -> None:
        self.interpreter = fx.Interpreter(owner, garbage_collect_values=False)
        self.interpreter.args_iter = iter(arguments)
        self.todo = list(owner.graph.nodes)

    def _step(self) -> fx.Node:
        node = self.todo.pop(0)
        with torch.no_grad():
            self.interpreter.env[node] = self.interpreter.run_node(node)
        return node

    def advance(self, targets: tuple[Any, ...]) -> None:
        """Runs up to and including the next node of one of `targets`."""
        while self._step().target not in targets:
            assert self.todo, "the graph has no such node any more"

    def finish(self) -> Any:
        """Runs the rest and returns what the graph returns."""
        while len(self.todo) > 1:
            self._step()
        return self.interpreter.run_node(self.todo.pop())
