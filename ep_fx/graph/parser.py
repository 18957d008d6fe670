"""Graphs from their text: what `print_graph` writes reads back as an equal graph, which can be verified and run.

    parse_graph(print_graph(graph))                 its process groups are called by their dimensions, "fsdp,ep"
    parse_graph(text, mesh=mesh_spec(mesh, sizes))  and by those of a real mesh

Names of fx nodes are those in the text. Values in ``meta`` are fake, with symbols of their own. A text
names operators and literals only, and reading it runs none but on fake values.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from ep_fx.graph.constants import read_constant
from ep_fx.graph.fakes import Fakes
from ep_fx.graph.groups import GroupTexts, bind_groups, group_positions
from ep_fx.graph.header import Head, read_computation, read_parameter, read_placeholder, usual_placeholder
from ep_fx.graph.info import NodeInfo, Phase, set_info
from ep_fx.graph.literals import Reader
from ep_fx.graph.manifest import BufferSpec, Manifest, MeshSpec, ParameterSpec
from ep_fx.graph.operators import check_call, find_target
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import GROUP_ARGUMENTS

_LEFT = re.compile(r"(?P<name>%\w+(?:\.\w+)*)(?:: (?P<type>.+?))? *= (?P<right>.*)")
_RETURNED = re.compile(r"return gradient of (?P<whose>%\w+(?:\.\w+)*|no parameter|no input): (?P<value>.*)")
_COMMENT = re.compile(r"# (?P<fqn>.*?) ?(?:\((?P<source>[^()]*:\d+)\))?")
_PLACEHOLDER = re.compile(
    r"(?P<what>parameter|buffer|input|tangent)(?: of output (?P<output>\d+))?"
    r'(?: (?P<name>"(?:[^"\\]|\\.)*"))? *(?P<fact>.*)'
)


_DAMAGE = (
    ValueError, LookupError, RuntimeError, TypeError, ArithmeticError, AttributeError, AssertionError, MemoryError
)  # fmt: skip
"""What a line that names no possible value makes of the reader, of torch and of sympy."""


class ParseError(ValueError):
    """A text that is no graph; the message shows the line and says what was expected."""


def parse_graph(
    text: str, *, mesh: MeshSpec | None = None, constants: Mapping[str, torch.Tensor] | None = None
) -> ParallelGraph:
    """The graph that `text` shows.

    Args:
        text: a whole graph, as `print_graph` writes it; one half alone is not enough.
        mesh: its sizes must be those in the text; the graph gets its process groups.
        constants: the large constants by name.

    Raises:
        ParseError: the text has another form, or was cut.
        ValueError: `mesh` does not fit.
    """
    graph = _Parser(dict(constants or {})).graph(text)
    return graph if mesh is None else bind_groups(graph, mesh)


class _Parser:
    """Reads one text, line by line."""

    def __init__(self, given: dict[str, torch.Tensor]) -> None:
        self._given = given
        self._head, self._fx = Head(), fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._phase = Phase.FORWARD
        self._parameters: list[ParameterSpec] = []
        self._zero: list[str] = []
        self._buffers: list[BufferSpec] = []
        self._inputs: list[str] = []
        self._tangents: dict[str, int] = {}
        self._wanted: list[str] = []
        self._outputs: list[Any] | None = None
        self._gradients: tuple[list[Any], list[Any]] = ([], [])
        self._order: list[str] = []
        self._computation: dict[str, int] = {}
        self._section: Callable[[str], None] = self._head.read

    def graph(self, text: str) -> ParallelGraph:
        for number, line in enumerate(text.split("\n"), 1):
            try:
                self._line(line.strip())
            except ParseError:
                raise
            except _DAMAGE as error:
                raise ParseError(f"line {number}: {line.strip()}\n  {_first_line(error)}") from error
        if self._outputs is None:
            raise ParseError("the text has no 'return [..]' of its forward half: it is not a whole graph")
        self._fx.output((tuple(self._outputs), *map(tuple, self._gradients)))
        set_info(next(reversed(self._fx.nodes)), NodeInfo(Phase.BACKWARD if self._tangents else Phase.FORWARD))
        if self._head.nodes is not None and len(self._fx.nodes) != self._head.nodes:
            raise ParseError(f"the text says it has {self._head.nodes} nodes, but shows {len(self._fx.nodes)}")
        if len(self._gradients[0]) != len(due := self._trained()):
            raise ParseError(f"the text returns {len(self._gradients[0])} gradients of parameters, {len(due)} are due")
        return ParallelGraph(self._fx, self._manifest(), self._constants, self._head.provides)

    def _line(self, line: str) -> None:
        if line == "placeholders:":
            self._begin(self._placeholder)
        elif line in ("forward:", "backward:"):
            self._phase = Phase(line[:-1])
            self._begin(self._node)
        elif line == "computes:":
            self._begin(self._number)
        elif line and not line.startswith("#"):
            self._section(line)

    def _begin(self, section: Callable[[str], None]) -> None:
        if self._section == self._head.read:
            self._head.check()
            self._fakes = Fakes(self._head.device, self._head.sizes)
            self._groups = GroupTexts(self._head.mesh)
        self._section = section

    # -- placeholders ----------------------------------------------------------------------------------------------
    def _placeholder(self, line: str) -> None:
        left = _LEFT.fullmatch(line)
        match = _PLACEHOLDER.fullmatch(left["right"]) if left else None
        if left is None or match is None:
            raise ValueError("expected '%name: type = parameter \"name\" facts', or buffer, input, tangent")
        name, what = left["name"], match["what"]
        given = json.loads(match["name"]) if match["name"] else str(len(self._tangents))
        usual = name[1:] if what == "input" else usual_placeholder(what, given)
        fact, target = read_placeholder(match["fact"], usual)
        node = self._add(name, self._fx.placeholder(target), left["type"])
        set_info(node, NodeInfo(Phase.BACKWARD if what == "tangent" else Phase.FORWARD))
        if what == "parameter":
            spec, is_zero = read_parameter(fact, given, target)
            self._head.check_gathers(spec.layout.gather_dims)
            self._parameters.append(spec)
            self._zero += [given] * is_zero
        elif what == "buffer":
            self._buffers.append(BufferSpec(given, target, fact == "updated in forward"))
        elif what == "tangent":
            self._tangents[target] = int(match["output"])
        else:
            self._inputs.append(target)
            self._wanted += [target] * (fact == "gradient returned")

    # -- nodes -----------------------------------------------------------------------------------------------------
    def _node(self, line: str) -> None:
        if line.startswith("return"):
            self._return(line)
            return
        left = _LEFT.fullmatch(line)
        if left is None and line.startswith("%"):
            raise ValueError("expected '%name: type = operator(arguments)'")
        name, kind, right = (left["name"], left["type"], left["right"]) if left else (None, None, line)
        reader = Reader(right, self._nodes)
        node = self._constant(reader, kind) if right.startswith("constant(") else self._call(reader)
        self._label(node, reader.rest())
        if name is not None:
            self._add(name, node, kind)

    def _call(self, reader: Reader) -> fx.Node:
        if reader.text.startswith("%"):
            source = reader.value()
            reader.expect("[")
            index = reader.value()
            reader.expect("]")
            if not isinstance(source, fx.Node):
                raise ValueError("expected '%value[index]'")
            return self._fx.call_function(operator.getitem, (source, index))
        target = find_target(reader.word())
        reader.expect("(")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while not reader.take(")"):
            if args or kwargs:
                reader.expect(",")
            name = reader.keyword()
            if name is None:
                args.append(reader.value())
            else:
                kwargs[name] = reader.value()
        for position in group_positions(target):
            if position < len(args) and isinstance(args[position], str):
                args[position] = self._groups.name(args[position])
        for name in GROUP_ARGUMENTS.intersection(kwargs):
            kwargs[name] = self._groups.name(kwargs[name])
        check_call(target, args, kwargs)
        return self._fx.call_function(target, tuple(args), kwargs)

    def _constant(self, reader: Reader, kind: str | None) -> fx.Node:
        reader.word()
        start = reader.at
        reader.expect("(")
        reader.items(")")
        like = self._fakes.value(kind) if kind else None
        name, value = read_constant(reader.text[start : reader.at], like, self._given)
        self._constants[name] = value
        return self._fx.create_node("get_attr", name)

    def _label(self, node: fx.Node, comment: str) -> None:
        match = _COMMENT.fullmatch(comment)
        if comment and match is None:
            raise ValueError(f"expected the end of the line, or a comment, at {comment[:40]!r}")
        fqn, source = (match["fqn"] or None, match["source"]) if match else (None, None)
        set_info(node, NodeInfo(self._phase, fqn, source))

    def _add(self, name: str, node: fx.Node, kind: str | None) -> fx.Node:
        if name in self._nodes:
            raise ValueError(f"there is a value {name} already")
        self._nodes[name] = node
        if node.op != "placeholder":
            node._rename(name[1:].replace(".", "_"))
        value = self._value(node, kind) if kind else None
        if value is not None:
            node.meta["val"] = value
        return node

    def _value(self, node: fx.Node, kind: str) -> Any:
        """The fake value of type `kind`; that of a long list is what its operator makes of its arguments' values."""
        if not kind.startswith("list["):
            return self._fakes.value(kind)
        inputs = {source: source.meta.get("val") for source in node.all_input_nodes}
        if any(value is None for value in inputs.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        with self._fakes.mode, self._fakes.env.ignore_fresh_unbacked_symbols():
            return cast(Callable[..., Any], node.target)(*args, **kwargs)

    # -- output ----------------------------------------------------------------------------------------------------
    def _return(self, line: str) -> None:
        match = _RETURNED.fullmatch(line)
        reader = Reader(match["value"] if match else line.removeprefix("return"), self._nodes)
        value = reader.value()
        if rest := reader.rest().partition("#")[0].strip():
            raise ValueError(f"expected the end of the line, or a comment, at {rest[:40]!r}")
        if match is None:
            if not isinstance(value, list) or self._outputs is not None:
                raise ValueError("expected one 'return [outputs]', and 'return gradient of %name: value' after it")
            self._outputs = value
            return
        whose = self._nodes.get(match["whose"])
        target = str(whose.target) if whose is not None else ""
        of_input = target in self._inputs or match["whose"] == "no input"
        due = self._trained()[len(self._gradients[0]) :]
        if not of_input and (not due or due[0].placeholder != target):
            raise ValueError(f"expected the gradient of {due[0].name if due else 'no further parameter'} here")
        self._gradients[of_input].append(value)
        self._order += [target] * (target in self._inputs)

    def _trained(self) -> list[ParameterSpec]:
        return [spec for spec in self._parameters if spec.trainable]

    def _number(self, line: str) -> None:
        what, number = read_computation(line)
        self._computation[what] = number

    def _manifest(self) -> Manifest:
        wanted = [*self._order, *(name for name in self._wanted if name not in self._order)]
        manifest = Manifest(
            mesh=self._head.mesh,
            parameters=tuple(self._parameters),
            buffers=tuple(self._buffers),
            inputs=tuple(self._inputs),
            tangents=tuple(self._tangents),
            num_outputs=self._head.outputs,
            differentiable=tuple(self._tangents.values()),
            input_grads=tuple(name for name in wanted if name in self._wanted),
            zero_gradients=tuple(self._zero),
            computation=self._computation,
            **self._head.policies,
        )
        names = {f"%p{index}": spec.name for index, spec in enumerate(self._parameters)}
        regions = [replace(r, parameters=tuple(names.get(n, n) for n in r.parameters)) for r in self._head.regions]
        return replace(manifest, regions=tuple(regions))


def _first_line(error: BaseException) -> str:
    """What an error says, without the stack that torch appends."""
    if isinstance(error, ValueError):
        return str(error)
    said = str(error).strip().partition("\n")[0]
    return f"no value of a graph: {type(error).__name__}: {said}"
