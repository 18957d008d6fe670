"""The tables: each number is counted again, from the graph or by hand."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ep_fx.cost import peaks
from ep_fx.explain import Explanation, explain
from ep_fx.explain.table import Table, fold
from ep_fx.graph import (
    Manifest,
    MeshSpec,
    NodeInfo,
    ParallelGraph,
    Phase,
    Role,
    is_backward,
    is_collective,
    set_info,
    split,
)
from ep_fx.graph.split import saved_values
from ep_fx.graph.values import bytes_of
from ep_fx.testing.synthetic import Sizes, logical_step, parallel_step


def test_units_say_what_a_rank_holds_and_what_a_gather_makes_of_it(explanation: Explanation) -> None:
    units = {unit.name: unit for unit in explanation.units}
    assert list(units) == list(explanation.graph.manifest.units)
    dense, experts = units["layers.0"], units["layers.1.moe.experts"]
    assert (dense.kind, dense.over, dense.ranks, dense.gathers) == ("dense", ("fsdp", "ep"), 4, (1, 1))
    assert (dense.shard_bytes, dense.full_bytes) == (4 * 16 * 4 + 2 * 4, 16 * 16 * 4 + 6 * 4)
    assert (experts.kind, experts.over, experts.ranks) == ("experts", ("fsdp",), 2)
    assert (experts.shard_bytes, experts.full_bytes) == (16 * 16 * 4, 2 * 16 * 16 * 4)


def test_every_collective_is_counted_with_the_size_of_its_group(explanation: Explanation) -> None:
    rows = explanation.collectives
    assert sum(row.count for row in rows) == sum(is_collective(node) for node in explanation.graph)
    assert {row.dims: row.ranks for row in rows} == {"fsdp,ep": 4, "fsdp": 2, "ep": 2}
    dispatch = next(row for row in rows if row.kind == "dispatch")
    assert (dispatch.formula, dispatch.bytes, dispatch.typical) == ("64*R", None, 64 * 96)


def test_bytes_that_depend_on_free_sizes_say_for_which_sizes_they_are(explanation: Explanation) -> None:
    notes = {table.title: table.note for table in explanation.tables()}
    for title in ("collectives", "kept for backward"):
        assert "sizes s0=6, s1=8, as in the trace and not of a run" in notes[title]


def test_bytes_are_worked_out_for_the_sizes_that_are_asked_for(graph: ParallelGraph, explanation: Explanation) -> None:
    asked = explain(graph, sizes={"s0": 12, "s1": 80})  # 20 times the tokens of the trace, 6 x 8
    rows = {row.kind: row.typical for row in asked.collectives}
    before = {row.kind: row.typical for row in explanation.collectives}
    assert rows["dispatch"] == 20 * 64 * 96
    assert rows["unshard"] == before["unshard"]
    bytes_of_tokens = [(row.kept, then.kept) for row, then in zip(asked.saved, explanation.saved, strict=True)]
    assert sum(now for now, _ in bytes_of_tokens) > 15 * sum(then for _, then in bytes_of_tokens)
    notes = {table.title: table.note for table in asked.tables()}
    assert notes["collectives"].endswith("sizes s0=12, s1=80")
    assert "sizes s0=12, s1=8, as in the trace" in explain(graph, sizes={"s0": 12}).tables()[1].note


def test_a_size_that_the_graph_does_not_have_is_refused_with_those_that_it_has(graph: ParallelGraph) -> None:
    with pytest.raises(ValueError, match=r"no free size 'batch'; free sizes .*: s0 \(6 in the trace\), s1 \(8"):
        explain(graph, sizes={"batch": 4})
    with pytest.raises(ValueError, match="sizes are 1 or more, got s1=0"):
        explain(graph, sizes={"s1": 0})


def test_the_one_host_sync_of_a_layer_is_its_splits(explanation: Explanation) -> None:
    assert [sync.node for sync in explanation.host_syncs] == ["context"]
    assert len(explain(parallel_step(3)).host_syncs) == 3


@pytest.mark.parametrize("ep", [1, 2])
def test_a_host_sync_speaks_of_an_exchange_where_there_is_one(ep: int) -> None:
    (sync,) = explain(parallel_step(1, Sizes(ep=ep))).host_syncs
    assert ("of the token exchange" in sync.why) == (ep > 1)


def test_bytes_are_those_that_the_note_says(explanation: Explanation) -> None:
    table = next(table for table in explanation.tables() if table.title == "collectives")
    assert table.note.startswith("bytes: the whole of a gather, what a rank sends in any other collective; R counted")
    names = explanation._subject.nodes
    for row, sent in (("all_to_all_single_1", "send_rows"), ("all_to_all_single_2", "ungroup")):
        answer = explanation.waiters(row)
        assert answer.formula == str(explanation._subject.text.symbols.rename(bytes_of(names[sent].meta["val"]) or 0))
        assert answer.formula in str(answer)
        assert "on balanced routing" in str(answer)


def test_an_operator_whose_result_has_a_size_of_its_own_is_a_host_sync() -> None:
    graph, env = fx.Graph(), ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        x = graph.placeholder("x")
        x.meta["val"] = mode.from_tensor(torch.ones(4))
        found: Any = x
        for target, args in ((torch.ops.aten.nonzero.default, ()), (torch.ops.aten.neg.default, ())):
            value = target(found.meta["val"], *args)
            found = graph.call_function(target, (found, *args))
            found.meta["val"] = value
        graph.output(((found,), (), ()))
    facts = Manifest(MeshSpec({}, {}), (), (), ("x",), (), 1, ())
    assert [(row.node, row.why) for row in explain(ParallelGraph(graph, facts)).host_syncs] == [
        ("nonzero", "nonzero: the size of its result")
    ]


def test_what_is_kept_is_what_the_split_keeps(explanation: Explanation) -> None:
    graph = explanation.graph
    names = {node.name: node for node in graph}
    rows = {row.node: row for row in explanation.saved}
    text = explanation._subject.text.names
    assert list(rows) == [text[names[name]] for name in split(graph).saved]
    assert [row.bytes for row in rows.values() if row.formula.isdigit()] == [
        int(row.formula) for row in rows.values() if row.formula.isdigit()
    ]


def test_a_view_of_a_kept_value_costs_nothing_more(graph: ParallelGraph) -> None:
    copy = graph.copy()
    readers = {node: [user for user in node.users if is_backward(user)] for node in saved_values(copy)}
    value, reader = next((node, users[0]) for node, users in readers.items() if len(users) > 1)
    with copy.graph.inserting_after(value):
        view = copy.call(torch.ops.aten.alias.default, value, like=value, value=value.meta["val"])
    reader.replace_input_with(value, view)
    before, after = explain(graph), explain(copy)
    assert [row.node for row in after.saved if row.shares] in (["alias"], [after._subject.text.names[value]])
    assert len(after.saved) == len(before.saved) + 1
    assert sum(r.kept for r in after.saved) == sum(r.kept for r in before.saved)


@pytest.mark.parametrize("halves", [(0,), (1,), (0, 1)])
def test_a_part_of_a_value_keeps_all_of_its_memory_and_two_parts_keep_it_once(halves: tuple[int, ...]) -> None:
    graph, facts = fx.Graph(), Manifest(MeshSpec({}, {}), (), (), ("x",), ("tangent",), 1, (0,))
    with FakeTensorMode() as mode:
        x, tangent = graph.placeholder("x"), graph.placeholder("tangent")
        x.meta["val"], tangent.meta["val"] = (mode.from_tensor(torch.ones(n)) for n in (10, 3))
        step = ParallelGraph(graph, facts)
        whole = _call(step, torch.ops.aten.neg.default, x)
        parts = _call(step, torch.ops.aten.split.Tensor, whole, 5)
        used = [_call(step, operator.getitem, parts, i) for i in halves]
        found = [_call(step, torch.ops.aten.mul.Tensor, part, tangent, phase=Phase.BACKWARD) for part in used]
    graph.output(((whole,), (), tuple(found[:1])))
    rows = explain(step).saved
    assert [row.bytes for row in rows] == [5 * 4] * len(halves)
    assert [row.kept for row in rows] == [10 * 4, 0][: len(halves)]


def _call(graph: ParallelGraph, target: Any, *args: Any, phase: Phase = Phase.FORWARD) -> fx.Node:
    node = graph.graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["val"] = target(*values) if phase is Phase.FORWARD else values[0]
    set_info(node, NodeInfo(phase=phase))
    return node


def test_the_elements_of_a_context_are_counted_like_those_of_any_result(explanation: Explanation) -> None:
    row = next(row for row in explanation.saved if row.node == "context.permuted_indices")
    assert row.kept == row.bytes == 96 * 8


def test_peaks_are_those_of_the_cost_model(explanation: Explanation) -> None:
    wanted = peaks(explanation.graph)
    assert {row.phase: (row.bytes, row.units) for row in explanation.peaks} == {
        phase: (peak.bytes, peak.units) for phase, peak in wanted.items()
    }


def test_the_text_has_every_table_and_the_json_every_row(explanation: Explanation) -> None:
    text = str(explanation)
    for table in explanation.tables():
        assert table.title in text
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
    found = json.loads(explanation.to_json())
    assert found["mesh"] == {"fsdp": 2, "ep": 2}
    for name in ("units", "collectives", "host_syncs", "saved", "peaks", "reductions"):
        assert len(found[name]) == len(getattr(explanation, name)) > 0
    assert found["collectives"][0]["phase"] == "forward"


def test_a_graph_before_any_pass_has_units_and_no_collective() -> None:
    found = explain(logical_step(1))
    assert found.collectives == ()
    assert {unit.gathers for unit in found.units} == {(0, 0)}
    assert len(found.host_syncs) == 1
    assert str(found)


def test_layers_that_say_the_same_are_folded_and_those_that_differ_are_not() -> None:
    rows = [(f"model.layers.{i}.mlp", "8" if i == 2 else "4") for i in range(5)] + [("root", "1"), ("layers.7", "4")]
    assert fold(rows) == (
        ("model.layers.[0-1, 3-4].mlp (4x)", "4"), ("model.layers.2.mlp", "8"), ("root", "1"), ("layers.7", "4"),
    )
    assert fold([("a", "1"), ("a", "1")]) == (("a (2x)", "1"),)


def test_a_table_is_aligned() -> None:
    assert str(Table("t", ("a", "long"), (("xyz", "1"),), "n")) == "t\na    long\n---  ----\nxyz  1\nn\n"


def test_explain_wants_a_captured_graph(graph: ParallelGraph) -> None:
    assert explain(graph).graph.nodes(Role.CONTEXT)
