"""The questions: what an answer says of the graph is true, and the rules that it names are those that break."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from torch import fx

from ep_fx.explain import Explanation, GatherAnswer, GradientAnswer, UnknownNameError, WaitersAnswer, explain
from ep_fx.graph import ParallelGraph, Phase, Role, role_of
from ep_fx.testing.synthetic import Sizes, parallel_step
from ep_fx.verify import verify

EXPERTS = "layers.0.experts"


@pytest.fixture(scope="module")
def step() -> ParallelGraph:
    """Valid under every rule."""
    graph = parallel_step(1, Sizes())
    assert verify(graph).ok
    return graph


def name_of(graph: ParallelGraph, unit: str, phase: Phase) -> str:
    found = explain(graph)
    places, names = found._subject.text.places, found._subject.text.names
    return next(names[n] for n in graph.nodes(Role.UNSHARD, phase) if places.unit(n) == unit)


def twin(graph: ParallelGraph, name: str) -> tuple[ParallelGraph, fx.Node]:
    """A copy of `graph`, and in it the node that `name` says in the text form."""
    node = explain(graph)._subject.nodes[name]
    copy = graph.copy()
    return copy, next(n for n in copy if n.name == node.name)


def read_shards(graph: ParallelGraph, unshard: fx.Node) -> None:
    """Without the gather: who read the whole parameters reads the shards."""
    wait = next(iter(unshard.users))
    for item in list(wait.users):
        for user in list(item.users):
            if role_of(user) is Role.RESHARD:
                graph.graph.erase_node(user)
        item.replace_all_uses_with(unshard.args[0][item.args[1]])  # type: ignore[index]
        graph.graph.erase_node(item)
    graph.graph.erase_node(wait)
    graph.graph.erase_node(unshard)


def start_first(graph: ParallelGraph, unshard: fx.Node) -> None:
    """The gather at the top of the step."""
    last = [node for node in graph if node.op == "placeholder"][-1]
    last.append(unshard)


def start_after_dispatch(graph: ParallelGraph, unshard: fx.Node) -> None:
    """The gather behind the exchange of rows."""
    later = next(n for n in graph.nodes(Role.REGROUP) if n > unshard)
    wait = next(iter(unshard.users))
    for node in reversed((unshard, wait, *wait.users)):
        later.append(node)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(
    ("edit", "rule"), [(read_shards, "live"), (start_first, "peak"), (start_after_dispatch, "ep-order")]
)
def test_the_rules_that_an_answer_names_break_without_the_gather_earlier_or_later(
    step: ParallelGraph, phase: Phase, edit: Callable[[ParallelGraph, fx.Node], None], rule: str
) -> None:
    name = name_of(step, EXPERTS, phase)
    assert rule in [reason.rule for reason in explain(step).why(name).reasons]
    copy, unshard = twin(step, name)
    edit(copy, unshard)
    assert rule in verify(copy).broken


def quoted(answer: GatherAnswer | WaitersAnswer | GradientAnswer) -> dict[str, str | None]:
    return {reason.rule: reason.broken for reason in answer.reasons}


@pytest.mark.parametrize("edit", [read_shards, start_first, start_after_dispatch, None])
def test_a_rule_is_called_broken_in_every_answer_that_names_it_where_verify_finds_it_broken(
    step: ParallelGraph, edit: Callable[[ParallelGraph, fx.Node], None] | None
) -> None:
    copy, unshard = twin(step, name_of(step, EXPERTS, Phase.FORWARD))
    if edit is not None:
        edit(copy, unshard)
    found, broken = explain(copy), verify(copy).broken
    names = found._subject.text.names
    answers = [found.why(names[n]) for n in copy.nodes(Role.UNSHARD)]
    seen = set[str]()
    for answer in [*answers, *(found.waiters(names[n]) for n in found._subject.facts.collectives)]:
        for rule, text in quoted(answer).items():
            assert (text is not None) == (rule in broken)
            assert ("BROKEN" in str(answer)) == any(quoted(answer).values())
            seen.add(rule)
    assert seen == {"live", "once", "ep-order", "peak", "wait", "pair"}


@pytest.mark.parametrize("edit", ["group", "divisor"])
def test_a_broken_reduction_is_called_broken_and_its_own_violation_is_shown(step: ParallelGraph, edit: str) -> None:
    copy = step.copy()
    if edit == "group":
        node = next(n for n in copy.nodes(Role.REDUCE_GRAD) if n.args[2] == copy.manifest.mesh.groups[("fsdp",)])
        node.args = (*node.args[:2], copy.manifest.mesh.groups[("ep",)])
    else:
        for node in copy.nodes(Role.SCALE_GRAD):
            node.args = (node.args[0], 2.0)
    rule = {"group": "reduce-once", "divisor": "divisor"}[edit]
    name = f"{EXPERTS}.w2"
    found = explain(copy).gradient(name)
    text = quoted(found)[rule]
    assert text is not None
    assert name in text
    assert rule in verify(copy).broken
    assert "not over ep" not in str(found) or edit == "divisor"
    assert f"rule {rule} is BROKEN in this graph: at %" in str(found)


@pytest.mark.parametrize(("fsdp", "ep", "differs"), [
    (1, 2, "over no dimension: every rank computes the whole gradient of its own experts"), (2, 1, "over fsdp\n"),
])
def test_an_expert_differs_over_ep_in_its_experts_not_in_their_gradient(fsdp: int, ep: int, differs: str) -> None:
    text = str(explain(parallel_step(1, Sizes(fsdp=fsdp, ep=ep))).gradient(f"{EXPERTS}.w1"))
    assert differs in text
    assert ("the exchange of tokens has summed over ep" in text) == (ep > 1)
    assert ("not over ep" in text) == (ep > 1)


def test_why_is_this_gather_here(step: ParallelGraph) -> None:
    found = explain(step)
    answer = found.why(name_of(step, EXPERTS, Phase.FORWARD))
    assert (answer.unit, answer.phase, answer.over, answer.ranks) == (EXPERTS, Phase.FORWARD, "fsdp", 2)
    assert set(answer.parameters) == {f"{EXPERTS}.w1", f"{EXPERTS}.w2"}
    assert answer.first is not None
    assert (answer.first.operator, answer.first.source) == ("grouped_mm", "synthetic.py:1")
    assert answer.freed is not None
    assert answer.freed.operator == "reshard"
    again = found.why(name_of(step, EXPERTS, Phase.BACKWARD))
    once = next(reason for reason in again.reasons if reason.rule == "once")
    assert f"%{answer.freed.node}" in once.here
    assert "once" not in [reason.rule for reason in answer.reasons]


def test_a_gathered_value_and_its_wait_are_answered_with_their_gather(explanation: Explanation) -> None:
    answers = {explanation.why(name).node.node for name in ("unshard_1", "%unshard_wait_1", "p1.full")}
    assert answers == {"unshard_1"}


def test_who_waits_for_this_exchange(step: ParallelGraph) -> None:
    found = explain(step)
    answer = found.waiters("all_to_all_single_1")
    assert (answer.kind, answer.subject, answer.over, answer.ranks) == ("dispatch", EXPERTS, "ep", 2)
    assert answer.wait is not None
    assert answer.wait.operator == "wait_tensor"
    assert [reader.operator for reader in answer.readers] == ["regroup"]
    assert answer.between == ()
    assert found.waiters(answer.wait.node) == answer
    reduce = next(n for n in found._subject.text.names.items() if role_of(n[0]) is Role.REDUCE_GRAD)[1]
    overlapped = found.waiters(reduce)
    assert overlapped.between
    position = found._subject.facts.position
    at = [position[found._subject.nodes[where.node]] for where in overlapped.between]
    start, end = (found._subject.nodes[w.node] for w in (overlapped.node, overlapped.wait) if w is not None)
    assert position[start] < min(at) <= max(at) < position[end]


def test_which_reductions_does_this_gradient_meet(step: ParallelGraph) -> None:
    found = explain(step)
    expert, dense = found.gradient(f"{EXPERTS}.w1"), found.gradient("layers.0.q")
    assert [(s.word, s.over, s.ranks, s.divisor) for s in expert.steps] == [
        ("reduce-scatter", ("fsdp",), 2, 1.0), ("divide", (), 1, 4.0),
    ]
    assert (expert.due, expert.inside) == (("fsdp",), ("ep",))
    assert [s.over for s in dense.steps] == [("fsdp", "ep"), ()]
    assert dense.divisor == dense.due_divisor == 4.0
    assert expert.computed is not None
    assert expert.computed.operator == "grouped_mm_backward"


def test_a_parameter_may_be_called_by_the_end_of_its_name_where_one_ends_so(step: ParallelGraph) -> None:
    found = explain(step)
    assert found.gradient("experts.w1") == found.gradient(f"{EXPERTS}.w1")
    with pytest.raises(UnknownNameError, match=r"'w1' is the end of several .* layers\.0\.experts\.w1, layers\.1"):
        explain(parallel_step(2)).gradient("w1")
    with pytest.raises(UnknownNameError, match=r"no parameter 'xperts\.w1'"):
        found.gradient("xperts.w1")


def test_a_parameter_may_be_called_as_the_text_calls_it_and_a_name_is_text(step: ParallelGraph) -> None:
    found = explain(step)
    place = list(step.manifest.names).index(f"{EXPERTS}.w1")
    assert found.gradient(f"%p{place}") == found.gradient(f"{EXPERTS}.w1")
    for ask, given in ((found.why, None), (found.gradient, 3), (found.waiters, None)):
        with pytest.raises(TypeError, match=rf"expected the name of a .* as text, such as .*, got {given} of type"):
            ask(given)  # type: ignore[arg-type]


def test_a_wrong_divisor_is_read_from_the_graph_beside_what_is_due(step: ParallelGraph) -> None:
    copy = step.copy()
    for node in copy.nodes(Role.SCALE_GRAD):
        node.args = (node.args[0], 2.0)
    answer = explain(copy).gradient("layers.0.q")
    assert (answer.divisor, answer.due_divisor) == (2.0, 4.0)
    assert "divisor" in verify(copy).broken


@pytest.mark.parametrize("ask", ["why", "waiters", "gradient"])
def test_an_unknown_name_is_answered_with_near_misses(explanation: Explanation, ask: str) -> None:
    near = "layers.1.moe.experts.w" if ask == "gradient" else "unshard_1"
    with pytest.raises(UnknownNameError, match=rf"did you mean .*{near}"):
        getattr(explanation, ask)(near + "x")


@pytest.mark.parametrize(
    ("ask", "name", "message"),
    [
        ("why", "layers.1.moe.experts", r"gathered by %unshard_3 \(forward\), %unshard_5 \(backward\)"),
        ("why", "layers.1.moe.experts.w", r"gathered by %unshard_3"),
        ("why", "mm", r"%mm in layers.0.fc \(model.py:12\) is no gather but compute of layers.0.fc"),
        ("waiters", "layers.1.moe.experts", r"%all_to_all_single_1 \(dispatch\), %all_to_all_single_2 \(combine\)"),
        ("waiters", "mm", "is no collective"),
    ],
)
def test_a_name_of_another_kind_is_told_what_to_ask_for(
    explanation: Explanation, ask: str, name: str, message: str
) -> None:
    with pytest.raises(UnknownNameError, match=message):
        getattr(explanation, ask)(name)


def test_answers_have_a_text_with_source_and_rule_and_a_json_form(explanation: Explanation) -> None:
    answers = (
        explanation.why("unshard_3"), explanation.waiters("all_to_all_single_1"),
        explanation.gradient("layers.1.moe.experts.w"),
    )
    for answer, rule in zip(answers, ("ep-order", "pair", "divisor"), strict=True):
        assert "model.py:12" in str(answer)
        assert f"rule {rule}" in str(answer)
        assert rule in json.dumps(answer.to_json())
