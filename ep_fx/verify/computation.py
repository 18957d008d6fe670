"""Rule `computes`: every output, gradient and buffer is the expression that capture recorded, wherever values travel.

    x @ full(w)          =  x @ w                      gathered, padded, assembled: still the parameter
    regroup(wait(..x))   =  dispatch(x)                lowered or not: the rows of x in the order of that context
    wait(all_reduce(y))  =  tp_sum(y)                  lowered or not: the sum of partial outputs
    scale(wait(..g))     =  g                          its sums and its divisor are other rules' affair

Each node gets a number, made of its operator and the numbers of its arguments; two graphs compute the same where the
numbers of what they return are equal. No name, position or label is part of a number; a value that was written in
place has a number for each state. One walk, O(nodes).
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ep_fx.graph import ParallelGraph, Role, is_mutation, role_of, target_name
from ep_fx.graph.aliases import Memory
from ep_fx.graph.effects import written_by
from ep_fx.verify.facts import Facts
from ep_fx.verify.reading import arg
from ep_fx.verify.rule import Violation, rule

_SAME = frozenset(
    {
        Role.PAD_SHARD, Role.UNPAD_SHARD, Role.ASSEMBLE, Role.DISASSEMBLE, Role.WAIT, Role.PAD_ROWS,
        Role.TP_SHARE,
    }
)
"""What they give is what they are given, elsewhere or in another form."""
_LISTS = frozenset(
    {
        Role.UNSHARD, Role.UNSHARD_WAIT, Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.REDUCE_GRAD_WAIT,
        Role.SCALE_GRAD,
    }
)
"""The same, of lists."""
_ROWS = {  # what happens to rows, and where the indices stand that say how
    Role.REGROUP: ("rows at experts", 1), Role.COMBINE_BACKWARD: ("rows at experts", 1),
    Role.UNGROUP: ("rows back", 1), Role.COMBINE: ("rows back", 1), Role.DISPATCH_BACKWARD: ("rows back", 2),
}
_FIELDS = {  # of a logical dispatch, of a lowered context
    Role.DISPATCH: {2: "counts", 3: "indices", 4: "splits"},
    Role.CONTEXT: {0: "indices", 1: "splits", 2: "splits", 3: "rows", 4: "counts"},
}
_EXPECTED = "the value that capture recorded for it, computed from the same inputs by the same operators"
_REMEDY = "move, gather and exchange values, but leave what is computed from them alone"


@rule("computes", "every output, gradient and buffer is computed as capture recorded it, from the same values")
def computes(facts: Facts) -> Iterator[Violation]:
    due = facts.manifest.computation
    if not due:
        return
    found = _results(facts)
    for what, number in due.items():
        facts.checked += 1
        node, got = found.get(what, (facts.output, None))
        if got != number:
            yield Violation(node, f"{what}: {_EXPECTED}", "another expression", _REMEDY)
    for what in sorted(found.keys() - due.keys()):
        yield Violation(found[what][0], f"{what}: {_EXPECTED}", "no record of it in the Manifest", "keep all records")


def computation(graph: ParallelGraph) -> dict[str, int]:
    """The number of everything that `graph` returns or keeps, as a fact for its Manifest."""
    return {what: number for what, (_, number) in _results(Facts(graph)).items()}


def _results(facts: Facts) -> dict[str, tuple[fx.Node, int]]:
    numbers = Numbers(facts)
    manifest = facts.manifest
    results = {f"output {i}": value for i, value in enumerate(facts.output_group(0))}
    if manifest.tangents:
        results |= {f"gradient of {spec.name}": path.entry for spec, path in facts.paths}
    inputs = zip(manifest.input_grads, facts.output_group(2), strict=False)
    results |= {f"gradient of input {name}": value for name, value in inputs}
    found = {what: (_at(facts, value), numbers.of(value)) for what, value in results.items()}
    placeholders = {node.target: node for node in facts.by_role[Role.PLACEHOLDER]}
    for buffer in manifest.buffers:
        node = placeholders.get(buffer.placeholder)
        if buffer.mutated and node is not None:
            found[f"buffer {buffer.name}"] = (node, numbers.of(node))
    return found


def _at(facts: Facts, value: Any) -> fx.Node:
    return value if isinstance(value, fx.Node) else facts.output


class _Kind(NamedTuple):
    """What all nodes of one target have in common: their role, a number, whether they draw noise or write memory."""

    role: Role
    number: int
    is_random: bool
    writes: bool


def _kind(node: fx.Node) -> _Kind:
    role, name = role_of(node), f"{target_name(node)}.{getattr(node.target, '_overloadname', '')}"
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return _Kind(role, _text(name), is_random, is_mutation(node) and role is not Role.RESHARD)


class Numbers:
    """The number of every node.

    Args:
        facts: of the graph.
    """

    def __init__(self, facts: Facts) -> None:
        self._aliases = facts.aliases
        self._constants = facts.graph.constants
        self._mesh = facts.manifest.mesh
        self._numbers: dict[fx.Node, Any] = {}
        self._states: dict[Memory, int] = {}
        self._drawn: dict[int, int] = {}
        self._packed: dict[Any, Any] = {}
        kinds: dict[int, _Kind] = {}
        for node, known in zip(facts.nodes, facts.table.kinds, strict=True):
            if known.target is None:
                self._numbers[node] = self._source(node)
                continue
            kind = kinds.get(id(known))
            if kind is None:
                kind = kinds[id(known)] = _kind(node)
            special = _SPECIAL.get(kind.role)
            self._numbers[node] = self._call(node, kind) if special is None else special(self, node, kind)
            if kind.writes:
                self._write(node)

    def of(self, value: Any) -> int:
        """The number of an argument: a node in its present state, a literal, or a container of these."""
        kind = type(value)
        if kind is fx.Node:
            number = self._numbers.get(value, 17)  # a node further down, or of another graph: rule `order` says so
            if self._states:
                number = self._in_state(value, number)
            return number if type(number) is int else hash(number)
        if kind is int:
            return hash((1, value + 1_000_003))
        if kind is float:
            return hash((2, value)) if value == value else 2
        if value is None:
            return 3
        if isinstance(value, (list, tuple)):
            return hash((4, *[self.of(item) for item in value]))
        if isinstance(value, bool):
            return 5 + value
        if isinstance(value, dict):
            return hash((7, *[(_text(key), self.of(item)) for key, item in sorted(value.items())]))
        if isinstance(value, slice):
            return hash((8, self.of(value.start), self.of(value.stop), self.of(value.step)))
        return _text(str(value))  # dtypes, devices, layouts, strings

    def _source(self, node: fx.Node) -> int:
        if node.op == "get_attr":
            return self._constant(str(node.target))
        return 0 if node.op == "output" else hash((9, _text(str(node.target))))

    def _call(self, node: fx.Node, kind: _Kind) -> int:
        parts = [10, kind.number]
        numbers, states = self._numbers, self._states
        for argument in node.args:
            number = numbers.get(argument) if type(argument) is fx.Node and not states else None
            parts.append(number if type(number) is int else self.of(argument))
        if node.kwargs:
            parts.append(self.of(dict(node.kwargs)))
        number = hash(tuple(parts))
        if not kind.is_random:
            return number
        drawn = self._drawn[number] = self._drawn.get(number, 0) + 1  # a second draw is another value
        return hash((18, number, drawn))

    def _constant(self, name: str) -> int:
        value = self._constants.get(name)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.device.type != "cpu":
            return hash((11, _text(name)))
        content = value.detach().contiguous().reshape(-1).view(torch.uint8)[:65536]
        return hash((11, _text(f"{value.dtype} {list(value.shape)}"), zlib.crc32(content.numpy().tobytes())))

    def _same(self, node: fx.Node, _: _Kind) -> Any:
        value = arg(node, 0)
        return self._numbers.get(value, 17) if isinstance(value, fx.Node) else self.of(value)

    def _exchange(self, node: fx.Node, kind: _Kind) -> Any:
        """Rows of a region travel as they are; what else is exchanged becomes something new."""
        value = arg(node, 0)
        packed = self._packed.get(value) if isinstance(value, fx.Node) else None
        return self._call(node, kind) if packed is None else packed

    def _sum(self, node: fx.Node, kind: _Kind) -> Any:
        """A sum of partial outputs over ``tp``, lowered or not; other sums are operators like any other."""
        if kind.role is Role.ALL_REDUCE and (arg(node, 1) != "sum" or self._mesh.dims_of(str(arg(node, 2))) != ("tp",)):
            return self._call(node, kind)
        return hash((20, self.of(arg(node, 0))))

    def _pack(self, node: fx.Node, kind: _Kind) -> Any:
        """Rows made ready for an exchange, which alone makes rows of them again."""
        self._packed[node] = self._rows(node, kind) if kind.role is Role.UNGROUP else self._same(node, kind)
        return hash((19, self._packed[node]))

    def _list(self, node: fx.Node, _: _Kind) -> Any:
        value = arg(node, 0)
        if isinstance(value, (list, tuple)):
            return tuple(self.of(item) for item in value)
        return self._numbers.get(value, 17) if isinstance(value, fx.Node) else self.of(value)

    def _rows(self, node: fx.Node, kind: _Kind) -> Any:
        role = kind.role
        what, place = _ROWS[role]
        indices = self.of(arg(node, place))
        rows = [arg(node, 0)] if role is not Role.DISPATCH_BACKWARD else [arg(node, 0), arg(node, 1)]
        found = tuple(hash((12, _text(what), self.of(value), indices)) for value in rows)
        return found if role is Role.DISPATCH_BACKWARD else found[0]

    def _context(self, node: fx.Node, kind: _Kind) -> Any:
        role = kind.role
        counts, region = arg(node, 0 if role is Role.CONTEXT else 1), _text(str(arg(node, 4)))
        source = hash((13, self.of(counts), region))
        fields = {i: hash((14, source, _text(name))) for i, name in _FIELDS[role].items()}
        if role is Role.DISPATCH:
            arrived = _text(_ROWS[Role.REGROUP][0])
            fields |= {i: hash((12, arrived, self.of(arg(node, 2 * i)), fields[3])) for i in (0, 1)}
        return tuple(fields[i] for i in range(5))

    def _getitem(self, node: fx.Node, _: _Kind) -> Any:
        source, index = node.args
        number = self._numbers.get(source) if isinstance(source, fx.Node) else self.of(source)
        if isinstance(number, tuple) and isinstance(index, int) and -len(number) <= index < len(number):
            return number[index]
        return hash((15, self.of(source), self.of(index)))

    # -- memory that is written ------------------------------------------------------------------------------------
    def _in_state(self, node: fx.Node, number: Any) -> Any:
        states = [self._states[m] for m in self._aliases.memory(node) if m in self._states]
        return hash((16, number, *states)) if states else number

    def _write(self, node: fx.Node) -> None:
        number = self._numbers[node]
        for value in written_by(node):
            for memory in self._aliases.memory(value):
                self._states[memory] = number if isinstance(number, int) else hash(number)


_SPECIAL: dict[Role, Callable[[Numbers, fx.Node, _Kind], Any]] = {
    **dict.fromkeys(_SAME, Numbers._same),
    **dict.fromkeys(_LISTS, Numbers._list),
    **dict.fromkeys(_ROWS, Numbers._rows),
    **dict.fromkeys(_FIELDS, Numbers._context),
    Role.SEND_ROWS: Numbers._pack,
    Role.UNGROUP: Numbers._pack,
    Role.EXCHANGE: Numbers._exchange,
    Role.TP_SUM: Numbers._sum,
    Role.ALL_REDUCE: Numbers._sum,
    Role.GETITEM: Numbers._getitem,
    Role.RESHARD: lambda *_: 0,
}


def _text(value: str) -> int:
    """A number for a text, the same in every process."""
    return zlib.crc32(value.encode()) | len(value) << 32
