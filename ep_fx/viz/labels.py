"""Title, second line and details of each box, in the words of the text form."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ep_fx.graph import Role, info_of, is_collective, role_of
from ep_fx.graph.places import Action, group_argument
from ep_fx.graph.printer import GraphText
from ep_fx.graph.roles import target_name
from ep_fx.graph.summary import moved_bytes
from ep_fx.graph.texts import group_text, plural, source_text
from ep_fx.graph.values import bytes_of, bytes_text
from ep_fx.viz.boxes import ROUTING, VIEWS, Box
from ep_fx.viz.model import Kind, Lane

_OPERATION = {
    Role.UNSHARD: "all-gather", Role.REDUCE_GRAD: "reduce-scatter", Role.ALL_REDUCE_GRAD: "all-reduce",
    Role.EXCHANGE: "all-to-all", Role.ALL_REDUCE: "all-reduce",
}
_MOST_OPERATORS = 2
_MOST_COLLECTIVES = 2


class Labels:
    """Writes on boxes.

    Args:
        text: the graph's text.
        fold: whether boxes stand for several nodes.
    """

    def __init__(self, text: GraphText, fold: bool) -> None:
        self._text, self._fold = text, fold

    def title(self, box: Box, band: str) -> str:
        """First line: what the box does, and for an FSDP unit whose."""
        if not box.nodes:
            return "not read"
        first = box.nodes[0]
        if first.op == "output":
            return "outputs"
        if first.op == "placeholder" or not self._fold:
            return self._text.names[first]
        if box.kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE):
            return f"{box.kind.value} {box.module.removeprefix(f'{band}.') or '?'}"
        if box.kind is Kind.CONTEXT:
            return "dispatch context"
        if box.kind is Kind.WAIT:
            return f"wait: {self._text.places[first].action.value} {box.module.removeprefix(f'{band}.')}"
        if self._text.places[first].action is not Action.COMPUTE:
            return self._region_title(box)
        return _compute_title(box, band)

    def _region_title(self, box: Box) -> str:
        """``dispatch``, ``dispatch weights``, ``combine backward``, ``exchange counts``."""
        if box.kind is Kind.EXCHANGE:
            return "exchange counts"
        value = next((v for n in box.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)), None)
        suffix = " weights" if value is not None and value.dim() == 1 else ""
        return self._text.places[box.nodes[0]].action.value + suffix

    def subtitle(self, box: Box) -> str:
        """Second line: the collective and its group, the number of nodes, the type of the result."""
        if not box.nodes:
            return _some([self._text.names[node] for node in box.stored], 4)
        first = box.nodes[0]
        moves = self._collectives(box)
        if box.lane is Lane.UNIT and self._fold:
            count = max(len(self._text.places.lists.get(node, ())) for node in box.nodes)
            noun = "gradient" if self._text.places[first].action is Action.REDUCE else "parameter"
            divisors = [f"\u00f7 {node.args[1]:g}" for node in box.nodes if role_of(node) is Role.SCALE_GRAD]
            counted = [plural(count, noun)] if len(moves) < _MOST_COLLECTIVES else []
            return " \u00b7 ".join([*counted, *moves, *divisors])
        if box.kind is Kind.CONTEXT and self._fold:
            return "splits, indices, shape"
        if first.op == "output":
            return ""
        what = moves if moves or not self._fold or first.op == "placeholder" else self._work(box)
        result = self._result(box)
        return " \u00b7 ".join([*what, *([result] if result else [])])

    def _work(self, box: Box) -> list[str]:
        """The operators of a compute box, their number where they are many, nothing where they are its title."""
        operators = _operators(box)
        if len(operators) > _MOST_OPERATORS:
            return [plural(len(box.nodes), "node")]
        is_told = box.kind is not Kind.COMPUTE or _is_named_for_operators(box)
        return [] if is_told else [", ".join(operators)]

    def _result(self, box: Box) -> str:
        """Type of what the box computes last; of its first part where that is a list."""
        for node in reversed(box.nodes):
            value = node.meta.get("val")
            if isinstance(value, (list, tuple)) and value and role_of(node) is not Role.CONTEXT:
                value = value[0]
            if isinstance(value, torch.Tensor) and (role_of(node) is not Role.GETITEM or not self._fold):
                return self._text.symbols.type(value)
        return self._text.symbols.type(box.nodes[-1].meta.get("val")) if not self._fold else ""

    def _collectives(self, box: Box) -> list[str]:
        """``all-gather over fsdp,ep`` for each collective in the box."""
        found = []
        for node in box.nodes:
            if is_collective(node):
                dims = group_text(group_argument(node) or "?", self._text.graph.manifest.mesh)
                found.append(f"{_OPERATION.get(role_of(node), target_name(node).split('::')[-1])} {dims}")
        return list(dict.fromkeys(found))

    def details(self, box: Box) -> list[tuple[str, str]]:
        """What hovering shows: module, type, source, group, bytes, parameters, the lines of the text form."""
        places, nodes = self._text.places, box.nodes
        sources = dict.fromkeys(source_text(source) for node in nodes if (source := info_of(node).source))
        known = [p.name for n in nodes for p in places.lists.get(n, ())]
        known += [spec.name for n in (*box.stored, *nodes) if (spec := places.parameters.get(n))]
        rows = [
            ("module", box.module),
            ("type", self._text.symbols.type(nodes[-1].meta.get("val")) if nodes else ""),
            ("source", _some(list(sources), 3)),
            ("collective", ", ".join(self._collectives(box))),
            ("bytes", self._bytes(nodes)),
            ("parameters", _some(list(dict.fromkeys(known)), 12)),
            ("nodes", _some([self.line(n) for n in nodes], 40, "\n")),
        ]
        return [(label, value) for label, value in rows if value]

    def line(self, node: fx.Node) -> str:
        """A node as the text form shows it, without its comment."""
        if node.op == "placeholder":
            return f"%{self._text.names[node]}"
        return "return" if node.op == "output" else self._text.line(node, note=False)

    def _bytes(self, nodes: Sequence[fx.Node]) -> str:
        """Bytes that the collectives move on one rank; of the last value where there is none."""
        text = self._text
        sizes = [moved_bytes(node, text.places, text.symbols) for node in nodes if is_collective(node)]
        sizes = sizes or [bytes_of(node.meta.get("val")) for node in nodes[-1:]]
        if not sizes or None in sizes:
            return ""
        total = text.symbols.rename(sum(size for size in sizes if size is not None))
        return bytes_text(int(total)) if isinstance(total, int) or total.is_number else f"{total} B"


def _operators(box: Box) -> list[str]:
    """The operators that do the work of a box, in order, each once; its views where there is nothing else."""
    names = [target_name(n) for n in box.nodes if role_of(n) is not Role.GETITEM]
    work = [name for name in names if name not in VIEWS]
    return list(dict.fromkeys(name.split("::")[-1].strip("_") for name in work or names))


def _is_named_for_operators(box: Box) -> bool:
    """Whether a box is a block's own step, or one of the routing: its module says too little."""
    is_block = box.module.rsplit(".", 1)[-1].isdigit()
    return not box.module or is_block or role_of(box.nodes[0]) in ROUTING


def _compute_title(box: Box, band: str) -> str:
    """The operators, or the module path below the band."""
    if _is_named_for_operators(box):
        return _some(_operators(box), _MOST_OPERATORS, rest="..") or box.module
    return box.module.removeprefix(f"{band}.")


def _some(items: list[str], most: int, separator: str = ", ", rest: str = "and {} more") -> str:
    """The first `most` items, and how many are left."""
    left = len(items) - most
    return separator.join([*items[:most], *([rest.format(left)] if left > 0 else [])])
