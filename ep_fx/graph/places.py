"""What each node is doing and for whom: ``gather`` of a unit, ``dispatch`` of a region, compute of a module.

    gather    pad_shard unshard unshard_wait getitem assemble         subject: FSDP unit
    free      reshard                                                 subject: FSDP unit
    reduce    disassemble reduce_grad .. scale_grad .. unpad_shard    subject: FSDP unit
    dispatch, combine, dispatch backward, combine backward            subject: MoE region
    sum over tp                                                       subject: MoE region
    compute   all else                                                subject: module path

Read off targets, arguments and the Manifest alone, in two walks over the graph. For readers (text, pictures,
summary); rules compute what they need themselves.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from torch import fx

from ep_fx.graph.info import info_of, is_backward
from ep_fx.graph.manifest import ParameterSpec
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import Role, is_collective, role_of

GROUP_ARGUMENTS = frozenset({"group", "group_name"})
CONTEXT_FIELDS = ("permuted_indices", "input_splits", "output_splits", "input_shape", "tokens_per_expert")
_INPUT_SPLITS, _OUTPUT_SPLITS = 1, 2
_GATHER = frozenset({Role.PAD_SHARD, Role.UNSHARD, Role.UNSHARD_WAIT, Role.ASSEMBLE})
_SENDING = frozenset({Role.SEND_ROWS, Role.REGROUP})
_RETURNING = frozenset({Role.UNGROUP, Role.PAD_ROWS})
_GRADIENT_LISTS = frozenset({Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.REDUCE_GRAD_WAIT, Role.SCALE_GRAD})


class Action(Enum):
    """What a node is part of."""

    GATHER = "gather"
    FREE = "free"
    REDUCE = "reduce"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    DISPATCH_BACKWARD = "dispatch backward"
    COMBINE_BACKWARD = "combine backward"
    SUM = "sum over tp"
    COMPUTE = "compute"


REGION_ACTIONS = frozenset({Action.DISPATCH, Action.COMBINE, Action.DISPATCH_BACKWARD, Action.COMBINE_BACKWARD})
_LOGICAL = {
    Role.DISPATCH: Action.DISPATCH, Role.COMBINE: Action.COMBINE,
    Role.DISPATCH_BACKWARD: Action.DISPATCH_BACKWARD, Role.COMBINE_BACKWARD: Action.COMBINE_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class Place:
    """What a node is doing (`action`) and for which unit, region or module (`subject`; None: not known)."""

    action: Action
    subject: str | None


class Places:
    """The `Place` of every node of a graph, and the parameter behind a shard, a full value or a gradient.

    Args:
        graph: the graph; it must not change while this object is in use.
    """

    def __init__(self, graph: ParallelGraph) -> None:
        self._graph = graph
        self.parameters: dict[fx.Node, ParameterSpec] = {}
        """Placeholders and full values (gathered, assembled) and the parameter that they hold."""
        self.lists: dict[fx.Node, tuple[ParameterSpec, ...]] = {}
        """Gathers, frees and reductions and the parameters in their lists."""
        self.gradients: dict[fx.Node, ParameterSpec] = {}
        """Nodes on the way of one parameter's gradient, from `disassemble` to the output."""
        self._trace_parameters()
        self._trace_gradients()
        self._places = {node: self._place(node) for node in graph}

    def __getitem__(self, node: fx.Node) -> Place:
        return self._places[node]

    # -- parameters ------------------------------------------------------------------------------------------------
    def _trace_parameters(self) -> None:
        by_placeholder = {p.placeholder: p for p in self._graph.manifest.parameters}
        for node in self._graph:
            role = role_of(node)
            if role is Role.PLACEHOLDER and node.target in by_placeholder:
                self.parameters[node] = by_placeholder[node.target]
            elif role in (Role.UNSHARD, Role.UNSHARD_WAIT, Role.RESHARD):
                self.lists[node] = self._specs_in(node.args[0])
            elif role in (Role.PAD_SHARD, Role.ASSEMBLE, Role.GETITEM) and (spec := self._spec_through(node)):
                self.parameters[node] = spec

    def _specs_in(self, value: Any) -> tuple[ParameterSpec, ...]:
        if isinstance(value, fx.Node):
            return self.lists.get(value, ())
        return tuple(self.parameters[item] for item in value if item in self.parameters)

    def _spec_through(self, node: fx.Node) -> ParameterSpec | None:
        source = cast(fx.Node, node.args[0])
        if role_of(node) is not Role.GETITEM:
            return self.parameters.get(source)
        specs, index = self.lists.get(source, ()), cast(int, node.args[1])
        return specs[index] if isinstance(index, int) and index < len(specs) else None

    def _trace_gradients(self) -> None:
        values = self._graph.gradients if self._graph.manifest.trainable else {}
        for name, value in values.items():
            if isinstance(value, fx.Node) and (role_of(value) is Role.UNPAD_SHARD or _is_gradient_element(value)):
                self.gradients[value] = self._graph.manifest.names[name]
        elements: dict[fx.Node, dict[int, ParameterSpec]] = {}
        for node in reversed(self._graph.graph.nodes):
            role = role_of(node)
            if role is Role.GETITEM and node in self.gradients:
                elements.setdefault(cast(fx.Node, node.args[0]), {})[cast(int, node.args[1])] = self.gradients[node]
            elif role is Role.UNPAD_SHARD and node in self.gradients:
                self.gradients.setdefault(cast(fx.Node, node.args[0]), self.gradients[node])
            elif role in _GRADIENT_LISTS and node in elements:
                self.lists[node] = tuple(elements[node][i] for i in sorted(elements[node]))
                if isinstance(node.args[0], fx.Node):
                    elements.setdefault(node.args[0], elements[node])
                    continue
                for index, item in enumerate(cast(list[fx.Node], node.args[0])):
                    if role_of(item) is Role.DISASSEMBLE and index in elements[node]:
                        self.gradients[item] = elements[node][index]

    # -- places ----------------------------------------------------------------------------------------------------
    def _place(self, node: fx.Node) -> Place:
        role = role_of(node)
        if role in _GATHER:
            return Place(Action.GATHER, self.unit(node))
        if role is Role.RESHARD:
            return Place(Action.FREE, self.unit(node))
        if role in _GRADIENT_LISTS or node in self.gradients or role in (Role.DISASSEMBLE, Role.UNPAD_SHARD):
            return Place(Action.REDUCE, self.unit(node))
        if role is Role.GETITEM and role_of(source := cast(fx.Node, node.args[0])) in (Role.UNSHARD, Role.UNSHARD_WAIT):
            return Place(Action.GATHER, self.unit(source))
        action = self.region_action(node)
        if action is not None:
            return Place(action, self.region(node))
        if self._is_sum(node):
            return Place(Action.SUM, info_of(node).fqn)
        return Place(Action.COMPUTE, info_of(node).fqn)

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether `node` adds up over ``tp``, or waits for it."""
        role = role_of(node)
        if role is Role.WAIT:
            return self._is_sum(cast(fx.Node, node.args[0]))
        dims = self._graph.manifest.mesh.dims_of(group_argument(node) or "") if role is Role.ALL_REDUCE else None
        return role is Role.TP_SUM or dims == ("tp",)

    def unit(self, node: fx.Node) -> str | None:
        """FSDP unit of a gather, free or reduction; joined by commas where a pass merged several."""
        spec = self.parameters.get(node) or self.gradients.get(node)
        specs = (spec,) if spec else self.lists.get(node, ())
        return ", ".join(dict.fromkeys(s.unit for s in specs)) or None

    def region_action(self, node: fx.Node) -> Action | None:
        """The half of a MoE region's exchange that `node` is part of, logical or lowered."""
        role = role_of(node)
        if role in _LOGICAL:
            return _LOGICAL[role]
        if role is Role.GETITEM:
            return self.region_action(cast(fx.Node, node.args[0]))
        if role is Role.WAIT:
            start = cast(fx.Node, node.args[0])
            return self.region_action(start) if role_of(start) is Role.EXCHANGE else None
        if role is Role.CONTEXT:
            return Action.DISPATCH
        if role is Role.EXCHANGE:
            part = self.exchange_part(node)
        else:
            part = "send" if role in _SENDING else "return" if role in _RETURNING else None
        if part is None:
            return None
        sending = part != "return"
        if is_backward(node):
            return Action.COMBINE_BACKWARD if sending else Action.DISPATCH_BACKWARD
        return Action.DISPATCH if sending else Action.COMBINE

    def exchange_part(self, node: fx.Node) -> str | None:
        """``counts``, ``send`` (rows to their experts) or ``return`` (rows back) of an all-to-all; None: not ours."""
        if role_of(node) is not Role.EXCHANGE:
            return None
        if self.context(node) is None:
            done = next(iter(node.users), None)
            feeds = done is not None and any(role_of(user) is Role.CONTEXT for user in done.users)
            return "counts" if feeds else None
        splits = node.args[1]
        is_field = isinstance(splits, fx.Node) and role_of(splits) is Role.GETITEM
        return "send" if is_field and cast(fx.Node, splits).args[1] == _OUTPUT_SPLITS else "return"

    def context(self, node: fx.Node) -> fx.Node | None:
        """The `dispatch_context` whose values `node` takes."""
        for source in node.all_input_nodes:
            if role_of(source) is Role.GETITEM and role_of(cast(fx.Node, source.args[0])) is Role.CONTEXT:
                return cast(fx.Node, source.args[0])
        return None

    def region(self, node: fx.Node) -> str | None:
        """MoE region of a node of an exchange: the `region` argument of its dispatch, combine or context."""
        role = role_of(node)
        if role is Role.CONTEXT or role in _LOGICAL:
            return next((str(a) for a in reversed((*node.args, *node.kwargs.values())) if isinstance(a, str)), None)
        if role in (Role.GETITEM, Role.WAIT):
            source = cast(fx.Node, node.args[0])
            return self.region(source) or self._region_of_users(node)
        context = self.context(node)
        return self.region(context) if context is not None else self._region_of_users(node)

    def _region_of_users(self, node: fx.Node) -> str | None:
        """The region of a counts exchange, found at the context that its wait feeds."""
        for user in node.users:
            for reader in (user, *user.users):
                if role_of(reader) is Role.CONTEXT:
                    return self.region(reader)
        return None


def _is_gradient_element(node: fx.Node) -> bool:
    return role_of(node) is Role.GETITEM and role_of(cast(fx.Node, node.args[0])) in _GRADIENT_LISTS


def group_argument(node: fx.Node) -> str | None:
    """The process-group name that a collective is given, None for other nodes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not is_collective(node):
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.name in GROUP_ARGUMENTS:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return str(value)
    return None
