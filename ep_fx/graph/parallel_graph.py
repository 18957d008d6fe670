"""The joint graph with its Manifest: what passes rewrite, rules read and pictures show.

One `fx.Graph` whose placeholders are parameters, buffers, inputs, tangents (in this order) and whose output is
``((outputs...), (parameter gradients...), (input gradients...))``. Forward nodes come before backward nodes.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from ep_fx.graph.info import NodeInfo, Phase, info_of, set_info
from ep_fx.graph.manifest import Manifest, ParameterSpec
from ep_fx.graph.roles import Role, is_effect, role_of


class ParallelGraph:
    """An `fx.Graph` and the facts about it that no pass may change.

    Args:
        graph: the joint graph; owned by this object from now on.
        manifest: frozen facts.
        constants: tensors that ``get_attr`` nodes name.
        provides: names of the passes that have run, in order.
    """

    def __init__(
        self,
        graph: fx.Graph,
        manifest: Manifest,
        constants: dict[str, torch.Tensor] | None = None,
        provides: tuple[str, ...] = (),
    ) -> None:
        self.graph = graph
        self.manifest = manifest
        self.constants = dict(constants or {})
        self.provides = provides

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelGraph:
        return self.copy()

    def copy(self) -> ParallelGraph:
        """A graph of its own with the same Manifest; values in ``meta`` are shared."""
        new = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            twin = new.node_copy(node, lambda n: env[n])
            twin._rename(node.name)
            twin.meta = copy.copy(node.meta)
            env[node] = twin
        return ParallelGraph(new, self.manifest, self.constants, self.provides)

    # -- queries ---------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self.graph.nodes)

    def nodes(self, role: Role | None = None, phase: Phase | None = None) -> list[fx.Node]:
        """Nodes in order, of one role and of one phase where these are given."""
        return [
            node
            for node in self.graph.nodes
            if (role is None or role_of(node) is role) and (phase is None or info_of(node).phase is phase)
        ]

    def positions(self) -> dict[fx.Node, int]:
        """Place of each node in the list; computed anew at each call, so keep it only while nothing moves."""
        return {node: index for index, node in enumerate(self.graph.nodes)}

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return cast(fx.Node, next(node for node in reversed(self.graph.nodes) if node.op == "output"))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the forward returns: nodes and constants."""
        return cast(tuple[Any, ...], cast(tuple[Any, ...], self.output.args[0])[0])

    @property
    def gradients(self) -> dict[str, Any]:
        """What the graph returns as gradient of each trainable parameter, by parameter name."""
        values = cast(tuple[Any, ...], cast(tuple[Any, ...], self.output.args[0])[1])
        return {p.name: g for p, g in zip(self.manifest.trainable, values, strict=True)}

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        """What the graph returns as gradients of the inputs."""
        return cast(tuple[Any, ...], cast(tuple[Any, ...], self.output.args[0])[2])

    def placeholder(self, name: str) -> fx.Node:
        """The placeholder called `name`.

        Raises:
            KeyError: no such placeholder.
        """
        for node in self.graph.nodes:
            if node.op != "placeholder":
                break
            if node.target == name:
                return cast(fx.Node, node)
        raise KeyError(f"no placeholder {name!r}")

    def parameter_nodes(self) -> dict[fx.Node, ParameterSpec]:
        """The placeholder of each parameter, in order."""
        placeholders = {node.target: node for node in self.graph.nodes if node.op == "placeholder"}
        return {placeholders[p.placeholder]: p for p in self.manifest.parameters}

    # -- edits -----------------------------------------------------------------------------------------------------
    def set_gradients(self, gradients: dict[str, Any]) -> None:
        """Replaces the gradients of the named parameters in the output."""
        outputs, _, inputs = cast(tuple[Any, ...], self.output.args[0])
        merged = {**self.gradients, **gradients}
        self.output.args = ((outputs, tuple(merged[p.name] for p in self.manifest.trainable), inputs),)

    def call(
        self, target: Any, *args: Any, like: fx.Node | None = None, phase: Phase | None = None, fqn: str | None = None,
        name: str | None = None, value: Any = None,
    ) -> fx.Node:
        """A new ``call_function`` at the graph's insertion point.

        Args:
            like: node whose phase, module path and source line the new one takes over.
            phase, fqn: override those.
            name: wished name.
            value: fake value for ``meta["val"]``.
        """
        node = self.graph.create_node("call_function", target, args, name=name)
        base = info_of(like) if like is not None else NodeInfo()
        set_info(node, NodeInfo(phase or base.phase, base.fqn if fqn is None else fqn, base.source))
        if value is not None:
            node.meta["val"] = value
        return node

    def remove_dead_code(self) -> int:
        """Erases nodes that nobody reads and that have no effect; returns how many."""
        erased = 0
        for node in reversed(self.graph.nodes):
            if not node.users and not is_effect(node):
                self.graph.erase_node(node)
                erased += 1
        return erased
