"""From an example to its pattern, traced as a capture traces a model, with its gradients by autograd.

Private torch API used here: ``make_fx``, ``FakeTensorMode``, ``ShapeEnv``, ``StatelessSymbolicContext``,
``enable_python_dispatcher``, ``_disable_current_modes``.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes

from ep_fx.targets.npu.patterns.pattern import Pattern, terms_of

aten = torch.ops.aten
Shape = tuple[int | None, ...]
"""A shape; None for a size that is free."""
_IDENTITY = (aten.detach.default, aten.lift_fresh.default)
_HINTS = (5, 7, 11, 13, 17, 19, 23, 29)


@dataclass(frozen=True)
class Example:
    """A function that stands for all that computes the same in the same way.

    Args:
        name: for people.
        function: of the input and of further ones; its result has one gradient.
        others: makes the further inputs, from the first.
        inputs: names of all of them.
        trained: those whose gradient is asked for.
        numbers: values by which the function knows numbers that may differ, with their names.
    """

    name: str
    function: Callable[..., Tensor]
    others: Callable[[Tensor], Sequence[Tensor]]
    inputs: tuple[str, ...]
    trained: tuple[str, ...]
    numbers: tuple[tuple[float, str], ...] = ()


@lru_cache(maxsize=256)
def trace(example: Example, shape: Shape, dtype: torch.dtype) -> Pattern:
    """The pattern of `example` for a first input of this shape.

    Returns:
        a pattern with the inputs of the example and ``grad``, and with the outputs ``result`` and ``grad_NAME``.
    """
    with _disable_current_modes():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        first = _fake(mode, shape, dtype)
        with mode:
            others = example.others(first)
            given = [first, *others]
            for name, tensor in zip(example.inputs, given, strict=True):
                tensor.requires_grad_(name in example.trained)
            grad = torch.empty_like(example.function(*given)).detach()

            def step(*tensors: Tensor) -> list[Tensor]:
                result = example.function(*tensors[:-1])
                wanted = [tensors[example.inputs.index(name)] for name in example.trained]
                return [result, *torch.autograd.grad(result, wanted, tensors[-1])]

            with enable_python_dispatcher(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                graph = make_fx(step)(*given, grad).graph
    return _pattern(graph, (*example.inputs, "grad"), example.trained, dict(example.numbers))


def _fake(mode: FakeTensorMode, shape: Shape, dtype: torch.dtype) -> Tensor:
    sizes = [hint if size is None else size for size, hint in zip(shape, _HINTS, strict=False)]
    dynamic = [DimDynamic.DYNAMIC if size is None else DimDynamic.STATIC for size in shape]
    real = torch.empty(sizes, dtype=dtype)
    return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))


def _pattern(graph: fx.Graph, inputs: Sequence[str], trained: Sequence[str], numbers: Mapping[float, str]) -> Pattern:
    for node in list(graph.nodes):
        if node.target in _IDENTITY:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    results: Any = graph.output_node().args[0]
    names = ("result", *(f"grad_{name}" for name in trained))
    outputs = {name: terms_of(node) if name != "result" else (node,) for name, node in zip(names, results, strict=True)}
    sums = {node for terms, top in zip(outputs.values(), results, strict=True) for node in _between(top, terms)}
    nodes = tuple(n for n in graph.nodes if n.op == "call_function" and is_tensor(n) and n not in sums)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Pattern(nodes, dict(zip(placeholders, inputs, strict=True)), outputs, dict(numbers))


def _between(top: fx.Node, terms: Sequence[fx.Node]) -> set[fx.Node]:
    """The sums from `top` down to its terms."""
    if top in terms:
        return set()
    return {top, *(n for source in top.all_input_nodes for n in _between(source, terms))}


def is_tensor(node: fx.Node) -> bool:
    """Whether the value of `node` is a tensor, not a size."""
    return isinstance(node.meta.get("val"), Tensor)
