"""Module path and source line of every traced node.

Private torch API used here: ``fx.traceback.annotate`` (its ``custom`` entry lands in ``node.meta`` of each node that is
traced while it is open), ``Node._sequence_nr`` and ``meta["seq_nr"]``, by which a backward node finds the forward node
that caused it.
"""
from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from ep_fx.graph import NodeInfo, Phase

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INNER = ("/torch/", "/ep_fx/", "/transformers/utils/", "/transformers/integrations/moe.py")


@dataclass
class Failure:
    """Where a trace failed: the innermost module that was running, None while nothing failed."""

    path: str | None = None


@contextmanager
def module_names(root: nn.Module) -> Iterator[Failure]:
    """Annotates what is traced inside each submodule's forward with its path; the hooks go away at the end."""
    stack: list[Any] = []
    failure = Failure()

    def before(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            annotation = torch.fx.traceback.annotate({"fqn": path})
            annotation.__enter__()
            stack.append(annotation)

        return hook

    def after(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            stack.pop().__exit__(None, None, None)
            if failure.path is None and sys.exc_info()[1] is not None:
                failure.path = path

        return hook

    handles = []
    try:
        for path, module in root.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(before(path)))
                handles.append(module.register_forward_hook(after(path), always_call=True))
        yield failure
    finally:
        for handle in handles:
            handle.remove()


def number_backward(roots: Sequence[torch.Tensor]) -> None:
    """Lets every node that autograd will trace for `roots` be annotated with the forward node behind it."""
    stack = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        stack.extend(following for following, _ in function.next_functions)
        _annotate_run(function, function._sequence_nr())


def _annotate_run(function: Any, number: int) -> None:
    """While autograd runs `function`, traced nodes are annotated with its sequence number."""
    annotation = torch.fx.traceback.annotate({"cause": number})

    def before(gradients: Any) -> None:
        annotation.__enter__()

    def after(inputs: Any, outputs: Any) -> None:
        annotation.__exit__(None, None, None)

    function.register_prehook(before)
    function.register_hook(after)


def node_infos(nodes: list[fx.Node], first_backward: int) -> dict[fx.Node, NodeInfo]:
    """The record of each traced node: nodes from index `first_backward` on are backward.

    A backward node is named by the forward node that caused it; a sum of gradients, which autograd makes between two of
    its functions, by what it adds up.
    """
    causes: dict[int, NodeInfo] = {}
    infos: dict[fx.Node, NodeInfo] = {}
    for index, node in enumerate(nodes):
        custom = node.meta.get("custom") or {}
        if index < first_backward:
            infos[node] = NodeInfo(Phase.FORWARD, custom.get("fqn"), _source(node.meta.get("stack_trace")))
            if node.op == "call_function" and node.meta.get("seq_nr") is not None:
                causes.setdefault(node.meta["seq_nr"], infos[node])
            continue
        inputs = (infos[i] for i in reversed(node.all_input_nodes) if i in infos and infos[i].fqn)
        cause = causes.get(custom["cause"]) if "cause" in custom else next(inputs, None)
        infos[node] = NodeInfo(Phase.BACKWARD) if cause is None else replace(cause, phase=Phase.BACKWARD)
    return infos


def _source(trace: str | None) -> str | None:
    """``file:line`` of the innermost frame that is the user's own code."""
    if not trace:
        return None
    frames = [f"{path}:{line}" for path, line in _FRAME.findall(trace) if not any(part in path for part in _INNER)]
    return frames[-1] if frames else None


def user_frame(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame of the user's code in the traceback of `error`."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def running_line() -> str | None:
    """``file:line`` of the innermost frame of the user's code that is running."""
    return _innermost(traceback.extract_stack())


def _innermost(frames: traceback.StackSummary) -> str | None:
    own = [f"{f.filename}:{f.lineno}" for f in frames if not any(part in f.filename for part in _INNER)]
    return own[-1] if own else None
