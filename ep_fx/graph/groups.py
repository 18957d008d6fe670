"""Process groups in text: by the mesh dimensions they span, ``"fsdp,ep"``; ``"tokens"`` for a group of exchanges only.

A graph read from text has these as the names of its groups; `bind_groups` gives it those of a real mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, cast

from torch import fx

from ep_fx.graph.manifest import MESH_DIMS, MeshSpec
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import GROUP_ARGUMENTS

TOKENS = "tokens"
"""Text of a group that only exchanges use."""
_FOREIGN = "group "
"""What stands before the name of a group that is none of the mesh's."""


@cache
def group_positions(target: Any) -> tuple[int, ...]:
    """Where an operator takes the name of a process group."""
    schema = getattr(target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return tuple(position for position, argument in enumerate(arguments) if argument.name in GROUP_ARGUMENTS)


class GroupTexts:
    """From the names of groups to their texts and back.

    Args:
        mesh: whose groups.
    """

    def __init__(self, mesh: MeshSpec) -> None:
        ordered = sorted(mesh.groups, key=lambda dims: [MESH_DIMS.index(dim) for dim in dims])
        self.of_dims = [",".join(dims) for dims in ordered]
        """Texts of the groups along mesh dimensions, in mesh order."""
        self.texts: dict[str, str] = {}
        for dims in ordered:
            self.texts.setdefault(mesh.groups[dims], ",".join(dims))
        if mesh.exchange:
            self.texts.setdefault(mesh.exchange, TOKENS)
        self._names = {text: name for name, text in self.texts.items()}

    def text(self, name: str) -> str:
        """Text of a group."""
        return self.texts.get(name, _FOREIGN + name)

    def name(self, text: str) -> str:
        """Name of a group.

        Raises:
            ValueError: the mesh has no such group.
        """
        if text in self._names:
            return self._names[text]
        if text.startswith(_FOREIGN):
            return text.removeprefix(_FOREIGN)
        raise ValueError(f"the mesh has no group {text!r}; its groups: {', '.join(self._names) or 'none'}")


def bind_groups(graph: ParallelGraph, mesh: MeshSpec) -> ParallelGraph:
    """A copy of `graph` whose groups are those of `mesh`.

    Raises:
        ValueError: `mesh` has other sizes, or lacks a group that the graph's mesh has.
    """
    old = graph.manifest.mesh
    if dict(old.sizes) != dict(mesh.sizes):
        raise ValueError(f"the graph is for a mesh of {dict(old.sizes)}, got one of {dict(mesh.sizes)}")
    if bool(old.exchange) != bool(mesh.exchange) or not old.groups.keys() <= mesh.groups.keys():
        raise ValueError(f"the graph needs the groups {list(GroupTexts(old).texts.values())}, got {mesh}")
    names = {name: mesh.groups[dims] for dims, name in old.groups.items()}
    if old.exchange:
        names[old.exchange] = mesh.exchange
    bound = graph.copy()
    bound.manifest = replace(graph.manifest, mesh=mesh)
    for node in bound:
        for name, argument in _groups_of(node):
            if isinstance(argument, str) and argument in names:
                _set(node, name, names[argument])
    return bound


def _groups_of(node: fx.Node) -> Iterator[tuple[int | str, Any]]:
    """Place and value of each group argument: a position or a keyword."""
    for position in group_positions(node.target) if node.op == "call_function" else ():
        if position < len(node.args):
            yield position, node.args[position]
    for name in GROUP_ARGUMENTS.intersection(node.kwargs):
        yield name, node.kwargs[name]


def _set(node: fx.Node, place: int | str, value: str) -> None:
    if isinstance(place, int):
        node.args = (*node.args[:place], value, *node.args[place + 1 :])
    else:
        node.kwargs = {**cast(dict[str, Any], node.kwargs), place: value}
