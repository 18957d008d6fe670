"""`assert_reduced_once`: over which mesh dimensions gradients are summed, and what they are divided by."""
from __future__ import annotations

import math
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from ep_fx.graph import MESH_DIMS, ParameterSpec
from ep_fx.testing.assertions.matches import around, said
from ep_fx.testing.graph_index import GraphIndex, index_of
from ep_fx.testing.select import SelectorError
from ep_fx.verify.reductions import dims_of, gradient_path


def assert_reduced_once(
    graph: Any, *parameters: str, over: tuple[str, ...] | None = None, divisor: float | None = None
) -> None:
    """Each gradient is summed over each mesh dimension that is due once and only once, and divided by one number.

    Args:
        parameters: patterns of names of trainable parameters; none: all of them.
        over: the dimensions that are due; None: those over which this parameter's contributions differ.
        divisor: None: that of the graph, the number of data ranks for a mean and 1 for a sum.

    Raises:
        AssertionError: one line for each parameter whose gradient is reduced otherwise.
        SelectorError: a pattern that no trainable parameter has.
        TypeError: `over` is one text, whose letters would be taken for dimensions.
        ValueError: `over` names what is no dimension of a mesh.
    """
    __tracebackhide__ = True
    index = index_of(graph)
    manifest = index.graph.manifest
    _check_over(over)
    wanted_divisor = manifest.grad_divisor if divisor is None else divisor
    lines, culprits = [], []
    for spec in _chosen(index, parameters):
        dims = manifest.reduce_dims(spec) if over is None else over
        steps, divided = _found(index, spec)
        got = Counter(dim for _, found in steps for dim in found)
        if got == Counter(dims) and math.isclose(divided, wanted_divisor):
            continue
        lines.append(f"{spec.name} ({spec.unit})")
        lines.append(f"  expected  summed over {', '.join(dims) or 'nothing'}, divided by {wanted_divisor:g}")
        said_steps = ", then ".join(f"{','.join(found)} (by {index.name(node)})" for node, found in steps)
        lines.append(f"  got       summed over {said_steps or 'nothing'}, divided by {divided:g}")
        culprits += [node for node, _ in steps] or _returned(index, spec)
    if lines:
        raise AssertionError(said("gradients are not reduced once", *lines, *around(index, culprits[:3])))


def _check_over(over: tuple[str, ...] | None) -> None:
    __tracebackhide__ = True
    if isinstance(over, str):
        raise TypeError(f"over: expected a tuple of mesh dimensions, got {over!r}; write over=({over!r},)")
    unknown = [dim for dim in over or () if dim not in MESH_DIMS]
    if unknown:
        got = ", ".join(map(repr, unknown))
        raise ValueError(f"over: expected dimensions of a mesh ({', '.join(MESH_DIMS)}), got {got}")


def _chosen(index: GraphIndex, patterns: tuple[str, ...]) -> list[ParameterSpec]:
    trainable = index.graph.manifest.trainable
    for pattern in patterns:
        if not any(fnmatchcase(spec.name, pattern) for spec in trainable):
            names = ", ".join(spec.name for spec in trainable) or "none"
            raise SelectorError(f"no trainable parameter {pattern!r} in this graph; there are: {names}")
    return [spec for spec in trainable if not patterns or any(fnmatchcase(spec.name, p) for p in patterns)]


def _found(index: GraphIndex, spec: ParameterSpec) -> tuple[list[tuple[fx.Node, tuple[str, ...]]], float]:
    """The sums over ranks that a gradient meets, in order, with their dimensions; and its divisor."""
    manifest, foreign = index.graph.manifest, ("a group that is none of the mesh's",)
    path = gradient_path(index.graph.gradients[spec.name], due=bool(manifest.reduce_dims(spec)))
    steps = [(node, dims_of(node, manifest.mesh) or foreign) for node, _ in path.reduces]
    return steps[::-1], path.divisor


def _returned(index: GraphIndex, spec: ParameterSpec) -> list[fx.Node]:
    value = index.graph.gradients[spec.name]
    return [value] if isinstance(value, fx.Node) else []
