"""Rule types: recorded fake values are what the operators give, sizes known at run time under any name."""
from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ep_fx.graph import Manifest, ParallelGraph, RegionSpec
from ep_fx.verify import verify
from tests.verify.breaking import replace_argument
from tests.verify.builder import DIM, EXPERTS, REGION, mesh_of

aten, ops = torch.ops.aten, torch.ops.ep_fx


class Typed:
    """``combine(experts(dispatch(permute(x))))`` with recorded values, its R unbacked and T symbolic."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.fx = fx.Graph()
        x = self.fx.placeholder("x")
        weight = self.fx.placeholder("weight")
        x.meta["val"] = self.mode.from_tensor(torch.empty(5, DIM))
        weight.meta["val"] = self.mode.from_tensor(torch.empty(EXPERTS, DIM, DIM))
        top = self.call(aten.topk.default, x, 2)
        weights, ids = self.items(top, 2)
        rows, counts, order = self.items(self.call(ops.permute.default, x, ids, EXPERTS), 3)
        dispatch = self.call(ops.dispatch.default, rows, counts, None, 1, REGION)
        routed, _, counts, indices, splits = self.items(dispatch, 5)
        y = self.call(ops.grouped_mm.default, routed, weight, counts, None, False)
        size = self.call(aten.sym_size.int, rows, 0)
        back = self.call(ops.combine.default, y, indices, splits, size, REGION)
        back = self.call(ops.unpermute.default, back, order, weights)
        self.turned = self.call(aten.t.default, back)
        self.fx.output(((self.call(aten.clone.default, self.turned),), (), ()))
        region = RegionSpec(REGION, EXPERTS, (), "u", has_backward=False)
        manifest = Manifest(mesh_of(), (), (), ("x", "weight"), (), 1, (), regions=(region,))
        self.graph = ParallelGraph(self.fx, manifest)
        self.rows, self.routed, self.y, self.back = rows, routed, y, back

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.fx.call_function(target, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values)
        return node

    def items(self, node: fx.Node, count: int) -> list[fx.Node]:
        found = []
        for index in range(count):
            item = self.fx.call_function(operator.getitem, (node, index))
            item.meta["val"] = node.meta["val"][index]
            found.append(item)
        return found

    def fake(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype)


def messages(graph: ParallelGraph) -> list[str]:
    return [f"{v.at.name}: {v.expected}, {v.got}" for v in verify(graph, ["types"]).of("types").violations]


def test_recorded_values_hold_under_new_names_of_unbacked_sizes() -> None:
    typed = Typed()
    before = (str(typed.routed.meta["val"].shape), list(typed.env.pending_fresh_unbacked_symbols))
    report = verify(typed.graph, types=True)
    assert report.ok, report.explain()
    assert report.of("types").checked >= 9
    assert (str(typed.routed.meta["val"].shape), list(typed.env.pending_fresh_unbacked_symbols)) == before


def test_types_runs_only_when_it_is_asked_for() -> None:
    assert "types" not in [r.rule.id for r in verify(Typed().graph).results]


@pytest.mark.parametrize(
    ("node", "value"),
    [
        ("y", lambda t: t.fake(10, DIM)),
        ("rows", lambda t: t.fake(11, DIM)),
        ("y", lambda t: t.y.meta["val"].to(torch.bfloat16)),
        ("turned", lambda t: t.turned.meta["val"].contiguous()),
        ("back", lambda t: t.back.meta["val"].unsqueeze(0)),
    ],
    ids=["static for unbacked", "another size", "another dtype", "other strides", "another rank"],
)
def test_a_wrong_record_is_caught(node: str, value: Any) -> None:
    typed = Typed()
    target: fx.Node = getattr(typed, node)
    with typed.mode:
        target.meta["val"] = value(typed)
    if node == "rows":
        for user in list(typed.fx.nodes):
            if user.target is ops.permute.default:
                user.meta["val"] = (target.meta["val"], *user.meta["val"][1:])
    assert messages(typed.graph)


def test_an_edit_that_changes_a_type_is_caught_at_its_reader() -> None:
    typed = Typed()
    with typed.fx.inserting_before(typed.turned):
        wider = typed.fx.call_function(aten.cat.default, ([typed.back, typed.back], 1))
    replace_argument(typed.turned, 0, wider)
    assert [text.split(":")[0] for text in messages(typed.graph)] == [typed.turned.name]


def test_arguments_that_an_operator_refuses_are_caught() -> None:
    typed = Typed()
    with typed.fx.inserting_before(typed.turned):
        wrong = typed.fx.call_function(aten.mm.default, (typed.back, typed.rows))
    replace_argument(typed.turned, 0, wrong)
    assert messages(typed.graph)[0].startswith("mm_default: arguments that the operator accepts, ")


def test_nodes_without_a_record_are_propagated() -> None:
    typed = Typed()
    with typed.fx.inserting_before(typed.turned):
        half = typed.fx.call_function(aten.to.dtype, (typed.back, torch.float16))
    replace_argument(typed.turned, 0, half)
    (message,) = messages(typed.graph)
    assert message.startswith(f"{typed.turned.name}: recorded: float32[")
    assert ", computed: float16[" in message


def test_graph_without_records_is_valid_and_unchecked() -> None:
    typed = Typed()
    for node in typed.fx.nodes:
        node.meta.pop("val", None)
    assert verify(typed.graph, ["types"]).of("types").checked == 0
