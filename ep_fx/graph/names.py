"""Stable names of values: from what a node computes and a running number, never from fx's own names.

    %p3  %p3.full  %p3.full_1  %p3.grad      shard of parameter 3, gathered in forward, again in backward, its gradient
    %b0  %tangent0  %input_ids               buffer, tangent, input
    %mm  %mm_1  %unshard  %all_to_all_single results, numbered per operator in order
    %context.input_splits  %topk.1           element of a result, by field where it has one
"""
from __future__ import annotations

import re
from typing import cast

from torch import fx

from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import CONTEXT_FIELDS, Places
from ep_fx.graph.roles import Role, role_of, target_name

_SUFFIX = {Role.PAD_SHARD: "padded", Role.ASSEMBLE: "full", Role.DISASSEMBLE: "blocks", Role.UNPAD_SHARD: "grad"}


def value_names(graph: ParallelGraph, places: Places) -> dict[fx.Node, str]:
    """The name of each node of `graph`, without the leading ``%``; all names differ."""
    manifest = graph.manifest
    fixed = {p.placeholder: f"p{i}" for i, p in enumerate(manifest.parameters)}
    fixed |= {b.placeholder: f"b{i}" for i, b in enumerate(manifest.buffers)}
    fixed |= {name: f"tangent{i}" for i, name in enumerate(manifest.tangents)}
    numbers = {p.name: f"p{i}" for i, p in enumerate(manifest.parameters)}
    taken: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    for node in graph:
        if node.op == "placeholder":
            base = fixed.get(str(node.target)) or _clean(str(node.target))
        else:
            base = _parameter_name(node, places, numbers) or _result_name(node, names)
        names[node] = _unique(base, taken)
    return names


def _parameter_name(node: fx.Node, places: Places, numbers: dict[str, str]) -> str | None:
    """Name of a value that is one parameter's in some form, or its gradient."""
    spec = places.parameters.get(node) or places.gradients.get(node)
    if spec is None:
        return None
    suffix = _SUFFIX.get(role_of(node))
    if suffix is None:
        is_full = spec.layout.is_even or not spec.layout.gather_dims
        forms = ("full", "grad") if is_full else ("gathered", "grad_padded")
        suffix = forms[node in places.gradients]
    return f"{numbers[spec.name]}.{suffix}"


def _result_name(node: fx.Node, names: dict[fx.Node, str]) -> str:
    role = role_of(node)
    if role is Role.CONTEXT:
        return "context"
    if role is not Role.GETITEM:
        return "constant" if node.op == "get_attr" else _clean(target_name(node).split("::")[-1])
    container, index = cast(fx.Node, node.args[0]), node.args[1]
    return f"{names[container]}.{field_name(container, index)}"


def field_name(container: fx.Node, index: object) -> str:
    """Name of element `index` of a result: its field in the schema or in the context, else the index."""
    fields: tuple[str, ...] = ()
    schema = getattr(container.target, "_schema", None)
    if role_of(container) is Role.CONTEXT or hasattr(container.target, "results"):
        fields = getattr(container.target, "results", CONTEXT_FIELDS)
    elif schema is not None:
        fields = tuple(returned.name or "" for returned in schema.returns)
    known = isinstance(index, int) and 0 <= index < len(fields) and len(fields) > 1
    return (fields[cast(int, index)] if known else "") or _clean(str(index))


def _clean(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "value"


def _unique(base: str, taken: dict[str, int]) -> str:
    """`base`, or with the next free number where it is taken."""
    name = base
    while name in taken:
        name = f"{base}_{taken[base]}"
        taken[base] += 1
    taken[name] = 1
    return name
