"""One captured program and its run: the forward and backward graphs under one `torch.autograd.Function`.

What forward leaves for backward are explicit outputs of the forward graph, held by the autograd node of that call and
dropped as backward consumes them. So nothing is shared between calls: any number of micro-batches can be in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from ep_fx.graph import History, ParallelGraph, PassRecord
from ep_fx.targets import Boxed

Rewrap = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Program:
    """The compiled form of one input structure and mode.

    Args:
        graph: the verified graph.
        lowered: what the two functions were emitted from: the same graph, or a copy of it that was lowered to a target.
        forward, backward: boxed functions; `backward` is None for a forward-only program.
        backward_inputs: for each placeholder that backward reads besides the saved values, its index among
            parameters, buffers, inputs and tangents in this order.
        violation: the first assumption about sizes that given inputs break, in words.
        out_spec, out_leaves, tensor_leaves: how to rebuild the output.
        records: what each pass did.
        history: the nodes and their order over the passes.
        wider_gradients: by the name of a parameter the dtype of its gradient, where a target has another than its own.
    """

    graph: ParallelGraph
    lowered: ParallelGraph
    forward: Boxed
    backward: Boxed | None
    backward_inputs: tuple[int, ...]
    violation: Callable[[Sequence[torch.Tensor]], str | None]
    out_spec: pytree.TreeSpec
    out_leaves: tuple[Any, ...]
    tensor_leaves: tuple[int, ...]
    records: tuple[PassRecord, ...]
    history: History
    wider_gradients: Mapping[str, torch.dtype]

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """The user's output object around the tensors of one run."""
        leaves = list(self.out_leaves)
        for index, value in zip(self.tensor_leaves, outputs, strict=True):
            leaves[index] = value
        return pytree.tree_unflatten(leaves, self.out_spec)


@dataclass(frozen=True)
class Call:
    """The arguments of one run, as local tensors, and how to hand a parameter's gradient back.

    Args:
        values: parameters (local shards), buffers, inputs.
        holders: the same tensors as the user holds them; a write in place to a DTensor shows in its own version only.
        rewrap: local gradient and parameter index to the gradient of the parameter as the user holds it.
        lock: held while a graph runs, so that the collectives of two threads do not interleave.
    """

    values: tuple[torch.Tensor, ...]
    holders: tuple[torch.Tensor, ...]
    rewrap: Rewrap
    lock: threading.RLock | Any


def run(program: Program, call: Call, parameters: Sequence[nn.Parameter], inputs: Sequence[torch.Tensor]) -> Any:
    """Runs `program` and returns the user's output object.

    Args:
        parameters: all parameters, in graph order, as the user holds them.
        inputs: the input tensors, in graph order.
    """
    if program.backward is None:
        with torch.no_grad(), call.lock:
            outputs, _ = program.forward(list(call.values))
        return program.rebuild(outputs)
    manifest = program.graph.manifest
    trained = [p for p, spec in zip(parameters, manifest.parameters, strict=True) if spec.trainable]
    wanted = [x for x, name in zip(inputs, manifest.inputs, strict=True) if name in manifest.input_grads]
    return program.rebuild(_Run.apply(program, call, *trained, *wanted))  # type: ignore[no-untyped-call]


class _Run(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, program: Program, call: Call, *differentiable: torch.Tensor) -> tuple[Any, ...]:
        with call.lock:
            outputs, saved = program.forward(list(call.values))
        owned = {id(x) for x in outputs}
        # an output that is also saved would keep its own autograd node alive: a cycle no collector sees
        ctx.saved = [x.detach() if id(x) in owned else x for x in saved]
        ctx.program, ctx.call = program, call
        ctx.versions = _versions(_kept(program, call, ctx.saved))
        wanted = set(program.graph.manifest.differentiable)
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if i not in wanted))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if ctx.saved is None:
            raise RuntimeError(
                "backward ran a second time on one forward of an ep_fx module; expected one, which computes all "
                "gradients and frees the saved values as they are used. For another backward call forward again. "
                "Zero-bubble pipeline schedules (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) call backward once "
                "for the inputs and once more for the weights and are not supported; accepted: GPipe, 1F1B, "
                "Interleaved1F1B, LoopedBFS"
            )
        program, call, saved = ctx.program, ctx.call, ctx.saved
        _refuse_changed(program, ctx.versions, _versions(_kept(program, call, saved)))
        ctx.saved = ctx.call = None
        manifest = program.graph.manifest
        tangents = [gradients[i].contiguous() for i in manifest.differentiable]
        pool = (*call.values, *tangents)
        arguments = [*saved, *(pool[i] for i in program.backward_inputs)]
        del saved
        with call.lock:
            found, inputs = program.backward(arguments)
        indices = [i for i, p in enumerate(manifest.parameters) if p.trainable]
        wrapped = [call.rewrap(g, i) for g, i in zip(found, indices, strict=True)]
        return (None, None, *wrapped, *inputs)


def _kept(program: Program, call: Call, saved: Sequence[Any]) -> list[Any]:
    """Everything from forward that backward reads: saved values, then parameters, buffers and inputs."""
    return [*saved, *(call.holders[i] for i in program.backward_inputs if i < len(call.holders))]


def _versions(values: Sequence[Any]) -> list[int | None]:
    """How often each tensor was written in place, as autograd counts it."""
    return [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None for x in values]


def _refuse_changed(program: Program, then: Sequence[int | None], now: Sequence[int | None]) -> None:
    """What autograd does for its own saved tensors.

    Raises:
        RuntimeError: something that backward reads was written in place after forward.
    """
    changed = [index for index, (a, b) in enumerate(zip(then, now, strict=True)) if a != b]
    if not changed:
        return
    manifest, first = program.graph.manifest, changed[0] - (len(then) - len(_placeholders(program)))
    what = "an output of the module, or a value that shares its memory"
    if first >= 0:
        what = _placeholders(program)[first]
    raise RuntimeError(
        f"{what} was written in place between forward and backward, which needs its old value ({len(changed)} such); "
        f"clone it before you change it. Inputs of this module: {list(manifest.inputs)}"
    )


def _placeholders(program: Program) -> list[str]:
    """Names of the parameters, buffers and inputs that backward reads."""
    manifest = program.graph.manifest
    names = [
        *(f"parameter {p.name}" for p in manifest.parameters),
        *(f"buffer {b.name}" for b in manifest.buffers),
        *(f"input {name.removeprefix('input_')}" for name in manifest.inputs),
    ]
    return [names[i] for i in program.backward_inputs if i < len(names)]
