"""The way of each gradient back from the output: every sum over ranks and every scale on it, to where it was computed.

    output <- [unpad_shard] <- getitem <- scale_grad <- wait <- all_reduce_grad <- wait <- reduce_grad <- [disassemble]

Lists are followed element by element. One walk per gradient, a handful of nodes long.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ep_fx.graph import Manifest, MeshSpec, ParameterSpec, Role, is_collective, role_of, target_name
from ep_fx.graph.groups import group_positions
from ep_fx.verify.reading import arg

aten = torch.ops.aten
_SAME_VALUE = frozenset(
    {
        aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.view.default,
        aten._unsafe_view.default, aten.reshape.default, torch.ops._c10d_functional.wait_tensor.default,
    }
)
_SCALES: dict[str, Callable[[float], float]] = {
    "aten::div": lambda x: x, "aten::mul": lambda x: 1 / x if x else float("inf"),
    "aten::_foreach_div": lambda x: x, "aten::_foreach_mul": lambda x: 1 / x if x else float("inf"),
}
"""Operators that scale by a number, and the divisor that the number amounts to."""


@dataclass
class GradientPath:
    """What happens to one gradient on its way to the output.

    Args:
        value: what the graph returns.
        reduces: (node, index in its list) of every reduction over ranks, last first.
        scales: every node that scales, last first.
        divisor: product of the divisors.
        disassembles, unpads: changes of form.
        entry: where the gradient was computed: the first thing that is none of these.
    """

    value: Any
    reduces: list[tuple[fx.Node, int | None]] = field(default_factory=list)
    scales: list[fx.Node] = field(default_factory=list)
    divisor: float = 1.0
    disassembles: list[fx.Node] = field(default_factory=list)
    unpads: list[fx.Node] = field(default_factory=list)
    entry: Any = None

    @property
    def at(self) -> fx.Node | None:
        """A node to point at."""
        return self.value if isinstance(self.value, fx.Node) else None


def due_dims(manifest: Manifest, spec: ParameterSpec) -> tuple[str, ...]:
    """The dimensions to sum a gradient over, worked out from the layout."""
    dims = ("replicate", "fsdp") if spec.layout.is_expert else ("replicate", "fsdp", "ep")
    return tuple(dim for dim in dims if manifest.mesh.sizes.get(dim, 1) > 1)


def gradient_path(value: Any, due: bool) -> GradientPath:
    """Follows `value` back.

    Args:
        value: what the graph returns as gradient.
        due: whether a reduction is due; if so, a division by a number that comes after it is on the path. Before the
            first reduction a division may be the model's own.
    """
    path = GradientPath(value)
    node, index = value, None
    while isinstance(node, fx.Node):
        step = _step(path, node, index, due)
        if step is None:
            break
        node, index = step
    path.entry = node
    return path


def _step(path: GradientPath, node: fx.Node, index: int | None, due: bool) -> tuple[Any, int | None] | None:
    """Notes what `node` does and returns what it was given; None where the gradient was computed by `node`."""
    role = role_of(node)
    if role is Role.GETITEM:
        return (node.args[0], node.args[1]) if _is_list_step(node.args[0]) else None  # type: ignore[return-value]
    if role in (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD):
        path.reduces.append((node, index))
    elif role is Role.SCALE_GRAD:
        path.scales.append(node)
        path.divisor *= float(arg(node, 1))
    elif role is Role.DISASSEMBLE:
        path.disassembles.append(node)
    elif role is Role.UNPAD_SHARD:
        path.unpads.append(node)
    elif is_collective(node):
        if not is_reduction(node):
            return None
        path.reduces.append((node, index))
    elif role is not Role.REDUCE_GRAD_WAIT and not _plain(path, node, due):
        return None
    return _element(arg(node, 0), index)


def _plain(path: GradientPath, node: fx.Node, due: bool) -> bool:
    """Whether `node` is a torch operator that only scales or hands on, while reductions are still to come."""
    if not due or path.disassembles or (path.reduces and not _more(node)):
        return False
    name, factor = target_name(node), arg(node, 1)
    if name in _SCALES and isinstance(factor, (int, float)):
        path.scales.append(node)
        path.divisor *= _SCALES[name](float(factor))
        return True
    return node.target in _SAME_VALUE


def _more(node: fx.Node) -> bool:
    """Whether a reduction comes before `node`, through nodes that scale or hand on."""
    source: Any = node
    while isinstance(source, fx.Node):
        role, name = role_of(source), target_name(source)
        if role in (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD) or is_reduction(source):
            return True
        if not (role in _LIST_ROLES or role is Role.GETITEM or name in _SCALES or source.target in _SAME_VALUE):
            return False
        source, _ = _element(arg(source, 0), 0)
    return False


_LIST_ROLES = frozenset({Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.REDUCE_GRAD_WAIT, Role.SCALE_GRAD})
_LIST_NAMES = frozenset({"aten::_foreach_div", "aten::_foreach_mul"})


def _is_list_step(node: Any) -> bool:
    return isinstance(node, fx.Node) and (
        role_of(node) in _LIST_ROLES or is_reduction(node) or target_name(node) in _LIST_NAMES
    )


def _element(value: Any, index: int | None) -> tuple[Any, int | None]:
    """Element `index` of a list argument; a node that is a list keeps the index."""
    if not isinstance(value, (list, tuple)):
        return value, index
    if index is None or not -len(value) <= index < len(value):
        return None, None
    return value[index], None


def is_reduction(node: fx.Node) -> bool:
    """Whether `node` sums over ranks: this dialect's or torch's all_reduce or reduce_scatter."""
    if role_of(node) in (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD):
        return True
    name = target_name(node)
    return name.startswith("_c10d_functional") and ("all_reduce" in name or "reduce_scatter" in name)


def dims_of(node: fx.Node, mesh: MeshSpec) -> tuple[str, ...] | None:
    """The mesh dimensions that a reduction sums over, None for a group that is none of theirs (the tokens' neither)."""
    for position in group_positions(node.target):
        group = str(arg(node, position))
        return None if group == mesh.exchange else mesh.dims_of(group)
    return None
