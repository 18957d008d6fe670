"""Assertions on graphs: each holds on a valid graph, notices one edit, and says expected, got and where."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_fx.graph import ParallelGraph, Phase, Role, print_graph
from ep_fx.testing import (
    SelectorError,
    assert_before,
    assert_collectives,
    assert_count,
    assert_equivalent,
    assert_flows,
    assert_live_range,
    assert_reduced_once,
    collective_lines,
    parse_graph,
    select,
)
from ep_fx.testing.assertions.equivalence import worst_token
from ep_fx.testing.select import combine, dispatch, grouped_mm, reshard, role, unshard
from ep_fx.testing.synthetic import Sizes, parallel_step

EXPERTS = "layers.0.experts"


@pytest.fixture
def graph() -> ParallelGraph:
    return parallel_step(2)


def late_gather(graph: ParallelGraph) -> None:
    """The gather of layer 0's experts moves behind the first node of its dispatch."""
    (gather, *_), (exchange, *_) = unshard(EXPERTS).find(graph), dispatch("layers.0").find(graph)
    exchange.nodes[0].append(gather.nodes[0])


def early_free(graph: ParallelGraph) -> None:
    """Layer 0's experts are freed before its combine."""
    (free, *_), (back, *_) = reshard(EXPERTS).find(graph), combine("layers.0").find(graph)
    back.nodes[0].prepend(free.nodes[0])


def no_free(graph: ParallelGraph) -> None:
    graph.graph.erase_node(reshard(EXPERTS).find(graph)[0].nodes[0])


def cut_context(graph: ParallelGraph) -> None:
    """Layer 1's combine sends its rows back with the context of layer 0's dispatch."""
    first, second = (combine(f"layers.{i}").find(graph)[0].nodes for i in (0, 1))
    for mine, other in zip(second, first, strict=True):
        mine.args = (mine.args[0], *other.args[1:])


def second_reduction(graph: ParallelGraph) -> None:
    (node,) = [n for n in graph.nodes(Role.REDUCE_GRAD) if n.args[2] == "fsdp"][:1]
    with graph.graph.inserting_before(node):
        again = graph.call(torch.ops.ep_fx.all_reduce_grad.default, node.args[0], "fsdp", like=node)
        waited = graph.call(torch.ops.ep_fx.reduce_grad_wait.default, again, like=node)
    node.args = (waited, *node.args[1:])


def no_division(graph: ParallelGraph) -> None:
    node = graph.nodes(Role.SCALE_GRAD)[0]
    node.args = (node.args[0], 2.0)


def failure(call: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as error:
        call(*args, **kwargs)
    return str(error.value)


def test_order(graph: ParallelGraph) -> None:
    assert_before(graph, unshard(EXPERTS), dispatch("layers.0"))
    assert_before(graph, "combine[layer=layers.0]", reshard(EXPERTS))
    assert_before(graph, combine(), "combine_backward")  # the two stand in different halves
    late_gather(graph)
    text = failure(assert_before, graph, unshard(EXPERTS), dispatch("layers.0"))
    assert f"expected  unshard[unit={EXPERTS}] before dispatch[layer=layers.0] in forward" in text
    assert re.search(r"got       %unshard_2 \(forward, module 'layers.0.experts', synthetic.py:1\) ends at \d+\n", text)
    assert re.search(r"  > %unshard_2: .* = ep_fx.unshard\(\[%p7, %p8\], 2, \"fsdp\"\)  # layers.0.experts", text)


def test_flow_of_data(graph: ParallelGraph) -> None:
    assert_flows(graph, "dispatch", "combine", "combine_backward", "dispatch_backward")
    assert_flows(graph, dispatch("layers.0"), dispatch("layers.1"))
    text = failure(assert_flows, graph, dispatch("layers.1"), dispatch("layers.0"))
    assert "expected  dispatch[layer=layers.0] computed from dispatch[layer=layers.1]" in text
    cut_context(graph)
    text = failure(assert_flows, graph, "dispatch", "combine")
    assert "expected  data from dispatch to combine\n" in text
    assert re.search(r"%all_to_all_single_3 .. %regroup_1 \(forward, module 'layers\.1.*\) does not come", text)


def strange_rows(graph: ParallelGraph) -> None:
    """Layer 0's combine returns rows that no expert has seen."""
    rows = next(n for n in graph.nodes(Role.UNGROUP))
    with graph.graph.inserting_before(rows):
        zeros = graph.call(torch.ops.aten.zeros_like.default, graph.graph.find_nodes(op="placeholder")[0], like=rows)
    rows.args = (zeros, rows.args[1])


def unused_dispatch(graph: ParallelGraph) -> None:
    """What layer 0's dispatch received is dropped: its own rows are regrouped."""
    rows = graph.nodes(Role.REGROUP)[0]
    rows.args = (graph.nodes(Role.SEND_ROWS)[0], rows.args[1])


def unused_combine(graph: ParallelGraph) -> None:
    """What layer 0's combine received is dropped."""
    rows = graph.nodes(Role.PAD_ROWS)[0]
    rows.args = (graph.nodes(Role.SEND_ROWS)[0], rows.args[1])


def mixed_context(graph: ParallelGraph) -> None:
    """Layer 1's rows are ungrouped with the indices of layer 0."""
    first, second = graph.nodes(Role.UNGROUP, Phase.FORWARD)
    second.args = (second.args[0], first.args[1])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (strange_rows, r"%ungroup .. %pad_rows .* the context of %all_to_all_single .. %regroup .*, but not its rows"),
        (unused_dispatch, r"%ungroup .. %pad_rows .* the context of %all_to_all_single .*, but not its rows"),
        (unused_combine, r"%ungroup .. %pad_rows .* the context of %all_to_all_single .*, but not its rows"),
        (mixed_context, r"the rows of %all_to_all_single_3 .. %regroup_1 .*, but not its context, or not alone"),
    ],
)
def test_rows_and_context_are_told_apart(
    graph: ParallelGraph, edit: Callable[[ParallelGraph], None], said: str
) -> None:
    edit(graph)
    assert re.search(said, failure(assert_flows, graph, "dispatch", "combine"))


def test_rows_flow_through_exchanges_of_one_rank_and_through_products() -> None:
    graph = parallel_step(2, Sizes(fsdp=2, ep=1))
    assert_flows(graph, "dispatch", "grouped_mm[phase=forward]", "combine", "combine_backward", "dispatch_backward")
    back = graph.nodes(Role.COMBINE)[0]
    back.args = (graph.nodes(Role.PERMUTE)[0].args[0], *back.args[1:])
    assert "but not its rows" in failure(assert_flows, graph, "dispatch", "combine")
    assert "is not computed" in failure(assert_flows, graph, "grouped_mm[layer=layers.0]", "combine[layer=layers.0]")


def test_counts(graph: ParallelGraph) -> None:
    assert_count(graph, "grouped_mm[layer=layers.0]", 2)
    assert_count(graph, "all_reduce_grad", 0)
    assert_count(graph, "reshard", at_least=3, at_most=10)
    no_free(graph)
    text = failure(assert_count, graph, reshard(EXPERTS), 2)
    assert "expected  2\n  got       1" in text
    assert "(backward, module 'layers.0.experts'" in text
    with pytest.raises(TypeError, match="takes a count"):
        assert_count(graph, "reshard")


def test_nothing_found_says_what_comes_near(graph: ParallelGraph) -> None:
    text = failure(assert_before, graph, "dispatch[phase=backward]", "combine")
    assert "nothing in the graph matches dispatch[phase=backward]" in text
    assert "without phase=backward there are 2, whose phase is forward:" in text
    text = failure(assert_before, graph, "unshard & dispatch", "combine")
    assert "unshard alone has 10:" in text
    assert "dispatch alone has 2:" in text
    assert "the graph has no all_reduce_grad; it has 10 all_to_all" in failure(
        assert_before, graph, "all_reduce_grad", "combine"
    )


def test_live_range(graph: ParallelGraph) -> None:
    experts = grouped_mm("layers.0")
    assert_live_range(graph, EXPERTS, covers=[dispatch("layers.0"), combine("layers.0"), experts])
    assert_live_range(graph, EXPERTS, freed_before="dispatch[layer=layers.1]")
    text = failure(assert_live_range, graph, EXPERTS, gathered_after=dispatch("layers.0"))
    assert "layers.0.experts.w1 gathered after dispatch[layer=layers.0] in forward" in text
    early_free(graph)
    text = failure(assert_live_range, graph, EXPERTS, covers=combine("layers.0"))
    assert "expected  layers.0.experts.w1 gathered throughout combine[layer=layers.0] in forward" in text
    assert re.search(r"got       gathered at \d+ by %unshard_2 \(.*\), freed at \d+", text)
    no_free(graph)
    assert_live_range(graph, EXPERTS, covers=combine("layers.0"))
    both = failure(assert_live_range, graph, EXPERTS, gathered_after=grouped_mm() | role("grouped_mm_backward"))
    assert re.findall(r"expected .* in (\w+)", both) == ["forward", "backward"]
    assert "never freed" in failure(assert_live_range, graph, EXPERTS, freed_before="dispatch[layer=layers.1]")


def test_reductions(graph: ParallelGraph) -> None:
    assert_reduced_once(graph)
    assert_reduced_once(graph, "*.experts.*", over=("fsdp",), divisor=4)
    text = failure(assert_reduced_once, graph, "head", over=("fsdp",))
    assert "head (root)\n    expected  summed over fsdp, divided by 4\n    got       summed over fsdp,ep (by %" in text
    with pytest.raises(SelectorError, match=r"no trainable parameter 'heat'.*there are: embedding, "):
        assert_reduced_once(graph, "heat")
    with pytest.raises(TypeError, match=r"over: expected a tuple of .*, got 'fsdp'; write over=\('fsdp',\)"):
        assert_reduced_once(graph, over="fsdp")                         # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"over: expected dimensions of a mesh \(replicate, fsdp, ep, tp\), got 'fsd'"):
        assert_reduced_once(graph, over=("fsd",))


@pytest.mark.parametrize(
    ("edit", "said"),
    [(second_reduction, r"summed over fsdp \(by %all_reduce_grad\), then fsdp \(by %reduce_grad"),
     (no_division, r"divided by 2\n")],
)
def test_wrong_reductions_are_shown(graph: ParallelGraph, edit: Callable[[ParallelGraph], None], said: str) -> None:
    edit(graph)
    assert re.search(said, failure(assert_reduced_once, graph))


def test_collectives(graph: ParallelGraph) -> None:
    lines = collective_lines(graph, "forward")
    assert lines[1:6] == [
        "unshard layers.0 over fsdp,ep", "unshard layers.0.experts over fsdp",
        "dispatch_counts layers.0.experts over ep", "dispatch layers.0.experts over ep",
        "combine layers.0.experts over ep",
    ]
    assert_collectives(graph, lines, "forward")
    assert_collectives(graph, {"unshard * over *": 10, "reduce_grad *": 5, "* over ep": 10})
    wished = [*lines[:3], "all_reduce * over ep", *lines[4:]]
    text = failure(assert_collectives, graph, wished, "forward")
    assert "    unshard layers.0.experts over fsdp\n  - all_reduce * over ep\n" in text
    assert "  + dispatch_counts layers.0.experts over ep\n" in text
    text = failure(assert_collectives, graph, {"unshard *": 9, "* over ep": 10})
    assert "- unshard *: expected 9, got 10" in text
    assert "+ reduce_grad layers.0 over fsdp,ep: expected none (%reduce_grad_" in text


@pytest.mark.parametrize("phase", ["forwards", "Forward", "", "fwd"])
def test_an_unknown_half_is_refused_by_all_that_take_one(graph: ParallelGraph, phase: Any) -> None:
    for call in (
        lambda: assert_collectives(graph, {}, phase), lambda: assert_collectives(graph, [], phase),
        lambda: collective_lines(graph, phase),
    ):
        with pytest.raises(ValueError, match=f"phase: expected 'forward' or 'backward' or None .both., got '{phase}'"):
            call()
    for selector in (select.phase(phase), ~select.phase(phase), select.phase(phase) | "combine"):
        with pytest.raises(SelectorError, match="phase"):
            assert_count(graph, selector, 0)


def test_one_text_is_no_list_of_lines(graph: ParallelGraph) -> None:
    with pytest.raises(TypeError, match="expected: a list of patterns or a mapping"):
        assert_collectives(graph, "*", "forward")


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a ParallelGraph"):
        assert_count("graph.txt", "unshard", 1)


def test_the_error_of_an_output_is_that_of_its_worst_token() -> None:
    want = torch.ones(1000, 4)
    got = want.clone()
    got[7] *= 1.5
    assert worst_token(got, want) == pytest.approx(0.5)
    assert worst_token(got[1:], want) == float("inf")
    got[7] = float("nan")
    assert worst_token(got, want) == float("inf")
    want[3] = 0.0
    assert worst_token(want + 1e-9, want) < 1e-5
    assert worst_token(torch.zeros(0, 4), torch.zeros(0, 4)) == 0.0


def test_only_a_transformed_module_is_compared() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"module: expected what ep_fx.transform returned .*, got Linear; the arg"):
        assert_equivalent(model, model, torch.ones(2, 2))  # type: ignore[arg-type]


def test_a_selection_by_phase_is_that_of_the_graph(graph: ParallelGraph) -> None:
    assert_count(graph, "node[phase=backward]", len(graph.nodes(phase=Phase.BACKWARD)))


def test_a_graph_read_from_its_text_is_asserted_on(graph: ParallelGraph) -> None:
    assert_collectives(parse_graph(print_graph(graph)), collective_lines(graph))
