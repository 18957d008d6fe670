"""Rule `partial`: what the ranks along `tp` hold parts of is added up once, over `tp`, and nothing else is.

    forward    partial = experts(rows)      -> one sum before combine
    backward   grad of the rows             -> one sum before dispatch_backward; of the scores, too
    gradients  of a cut parameter: cut like it; of any other: whole on every rank

The two halves of the rule are one walk: who meets a summand that is not summed, and who sums what is none.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ep_fx.graph import Role, is_collective, is_mutation, role_of
from ep_fx.graph.effects import written_by
from ep_fx.graph.zeros import is_zero
from ep_fx.verify.cut_flow import follow
from ep_fx.verify.cuts import SUMMAND, Cut, NotKnownError, State
from ep_fx.verify.facts import Facts
from ep_fx.verify.reading import arg, flat_nodes
from ep_fx.verify.reductions import dims_of
from ep_fx.verify.rule import Violation, rule

_REMEDY = "sum over tp once: the partial outputs of experts before combine, gradients of their inputs where they enter"


@rule("partial", "a summand over tp is summed over tp once, before anything that is not linear; nothing else is summed")
def partial(facts: Facts) -> Iterator[Violation]:
    facts.checked += len(facts.collectives)
    if facts.manifest.mesh.size("tp") == 1:
        return
    states: dict[fx.Node, Any] = {
        node: Cut(spec.layout.tp_dim, spec.layout.tp_blocks)
        for node, spec in facts.placeholders.items()
        if spec.layout.tp_dim is not None
    }
    for node in facts.nodes:
        role = role_of(node)
        over_tp = _sums_over_tp(facts, node, role)
        if over_tp is not None:
            yield from _summed(facts, node, states.get(arg(node, 0)), over_tp)
        elif node.op == "call_function" and not states.keys().isdisjoint(node._input_nodes):
            facts.checked += 1
            yield from _followed(node, role, states)
    yield from _returned(facts, states)


def _sums_over_tp(facts: Facts, node: fx.Node, role: Role) -> str | None:
    """How `node` joins values of the ranks along ``tp``: ``"sum"``, or what else it does; None: it does not."""
    if role in (Role.TP_SUM, Role.TP_SHARE):
        return "sum" if role is Role.TP_SUM else "share"
    if not is_collective(node) or "tp" not in (dims_of(node, facts.manifest.mesh) or ()):
        return None
    if role is Role.ALL_REDUCE and dims_of(node, facts.manifest.mesh) == ("tp",):
        return str(arg(node, 1))
    return str(node.target)


def _summed(facts: Facts, node: fx.Node, state: State, how: str) -> Iterator[Violation]:
    facts.checked += 1
    if role_of(node) in (Role.TP_SUM, Role.TP_SHARE) and arg(node, 1) != facts.manifest.mesh.size("tp"):
        yield Violation(node, f"tp_size {facts.manifest.mesh.size('tp')}, the mesh's", repr(arg(node, 1)), _REMEDY)
    due = None if how == "share" else SUMMAND
    if how not in ("sum", "share") or state != due:
        expected = "values that all ranks along tp have" if how == "share" else "a sum over tp of partial outputs only"
        yield Violation(node, expected, f"{how} of {_text(state)}", _REMEDY)


def _followed(node: fx.Node, role: Role, states: dict[fx.Node, Any]) -> Iterator[Violation]:
    try:
        result = follow(node, role, states)
    except NotKnownError as error:
        given = ", ".join(f"%{n.name}, {_text(states[n])}" for n in node._input_nodes if n in states)
        yield Violation(node, str(error), given, _REMEDY)
        return  # what follows from it is taken as whole: one violation for one fault
    if is_mutation(node) and role is not Role.RESHARD:
        for value in written_by(node):
            if states.get(value) != result and not is_zero(value):
                yield Violation(node, f"a write of {_text(states.get(value))}", _text(result), _REMEDY)
    if result is not None:
        states[node] = result


def _returned(facts: Facts, states: dict[fx.Node, Any]) -> Iterator[Violation]:
    """Outputs and gradients of inputs are whole, and so is every gradient but those of cut parameters."""
    for value in flat_nodes((facts.output_group(0), facts.output_group(2))):
        if value in states:
            yield Violation(value, "outputs that all ranks along tp have", _text(states[value]), _REMEDY)
    for name, value in facts.gradients.items():
        layout = facts.manifest.names[name].layout
        due = None if layout.tp_dim is None else Cut(layout.tp_dim, layout.tp_blocks)
        if isinstance(value, fx.Node) and not is_zero(value):
            facts.checked += 1
            if states.get(value) != due:
                got = _text(states.get(value))
                yield Violation(value, f"the gradient of {name}, which is {_text(due)}", got, _REMEDY)


def _text(state: Any) -> str:
    if state is None:
        return "the same on all ranks along tp"
    if state is SUMMAND:
        return "a summand over tp"
    if isinstance(state, Cut):
        return f"cut over tp along dim {state.dim}" + (f" in {state.blocks} blocks" if state.blocks > 1 else "")
    return "a list"
