"""Rule `target` on lowered graphs: all is well, and each way to break a kernel's arguments is named."""
from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import fx

import ep_fx
from ep_fx.graph import ParallelGraph, target_name
from ep_fx.targets.npu import check_target
from ep_fx.targets.npu.kernels import matmul
from ep_fx.targets.npu.lowering import Lowering
from ep_fx.targets.npu.rule import run_time_conditions
from ep_fx.testing.fake import fake_mesh
from ep_fx.verify import VerificationError
from tests.models.tiny_moe import TinyMoE, token_ids
from tests.npu.lowered import called, hf_for_npu, tiny_for_npu

GRAPHS: dict[str, Callable[[], ParallelGraph]] = {
    "bf16": lambda: hf_for_npu("mixtral", torch.bfloat16, fsdp=2, ep=2).lowered,
    "weights that travel": lambda: tiny_for_npu(scores="positional", score="before").lowered,
    "rows without an expert": lambda: tiny_for_npu(grouped=True).lowered,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_lowered_graphs_keep_the_rule(name: str) -> None:
    report = check_target(GRAPHS[name]())
    assert report.ok, report.explain()
    assert report.of("target").checked >= 12


def test_conditions_of_the_run_are_listed_and_few() -> None:
    graph = GRAPHS["bf16"]()
    found = run_time_conditions(graph)
    limits: dict[str, set[int | None]] = {}
    for node, findings in found.items():
        limits.setdefault(target_name(node), set()).update(f.condition.limit for f in findings)
    assert limits.pop("npu_rotary_mul") == {1000}
    assert limits.pop("npu_rotary_mul_backward") == {1000, 1024}  # beyond, the kernel itself leaves it to ATen
    assert limits.pop("npu_fusion_attention") == limits.pop("npu_fusion_attention_grad") == {2 << 20, 1 << 20}
    assert set.union(*limits.values()) == {16777215}
    assert len(found) >= 4


def _retype(node: fx.Node, dtype: torch.dtype) -> None:
    """The node claims another dtype."""
    node.meta["val"] = node.meta["val"].to(dtype)


def _counts_of_another_exchange(graph: ParallelGraph) -> None:
    products = called(graph, "npu_grouped_matmul")
    first = products[0].args[2]
    other = next(p for p in products if p.args[2] is not first)
    other.update_arg(2, first)


def _counts_of_all_experts(graph: ParallelGraph) -> None:
    product = called(graph, "npu_grouped_matmul")[0]
    counts = product.args[2]
    assert isinstance(counts, fx.Node)
    counts.meta["val"] = counts.meta["val"].new_empty(8)


def _wrong_k(graph: ParallelGraph) -> None:
    weight = called(graph, "npu_grouped_matmul")[0].args[1]
    assert isinstance(weight, fx.Node)
    weight.meta["val"] = weight.meta["val"][:, :-1]


def _weight_in_float32(graph: ParallelGraph) -> None:
    weight = called(graph, "npu_grouped_matmul")[0].args[1]
    assert isinstance(weight, fx.Node)
    _retype(weight, torch.float32)


def _no_probs(graph: ParallelGraph) -> None:
    unpermute = next(node for node in called(graph, "npu_moe_token_unpermute") if len(node.args) > 2)
    unpermute.args = unpermute.args[:2]


def _tokens_in_float64(graph: ParallelGraph) -> None:
    tokens = called(graph, "npu_moe_token_permute")[0].args[0]
    assert isinstance(tokens, fx.Node)
    _retype(tokens, torch.float64)


def _ids_of_other_tokens(graph: ParallelGraph) -> None:
    ids = called(graph, "npu_moe_token_permute")[0].args[1]
    assert isinstance(ids, fx.Node)
    ids.meta["val"] = ids.meta["val"].new_empty((3, 2))


def _sorted_as_int64(graph: ParallelGraph) -> None:
    order = called(graph, "npu_moe_token_unpermute")[0].args[1]
    assert isinstance(order, fx.Node)
    _retype(order, torch.int64)


def _not_recorded(graph: ParallelGraph) -> None:
    del called(graph, "npu_moe_token_permute")[0].args[0].meta["val"]  # type: ignore[union-attr]


def _uncompleted(graph: ParallelGraph) -> None:
    product = called(graph, "npu_grouped_matmul")[0]
    counts = product.args[2]
    assert isinstance(counts, fx.Node)
    with graph.graph.inserting_before(product):
        other = graph.call(torch.ops.aten.add.Tensor, counts, 0, like=product, value=counts.meta["val"])
    product.update_arg(2, other)


BROKEN: dict[str, tuple[Callable[[ParallelGraph], None], str]] = {
    "counts of another exchange": (_counts_of_another_exchange, "counts that add up to the rows: both of one context"),
    "counts of no exchange": (_uncompleted, "counts that add up to the rows: both of one context"),
    "counts of all experts": (_counts_of_all_experts, "group_list: one entry for each local expert"),
    "another K": (_wrong_k, "npu_grouped_matmul, weight: the columns of x"),
    "two dtypes": (_weight_in_float32, "one dtype for x and weight"),
    "no probs": (_no_probs, "without probs topK is 1"),
    "float64": (_tokens_in_float64, "tokens: torch.float16 or torch.bfloat16 or torch.float32"),
    "other ids": (_ids_of_other_tokens, "one row of ids for each token"),
    "int64 order": (_sorted_as_int64, "sorted_indices: torch.int32"),
    "no record": (_not_recorded, "arguments with recorded values"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_arguments_are_named(name: str) -> None:
    graph = hf_for_npu("mixtral", torch.bfloat16, fsdp=2, ep=2).lowered.copy()
    for node in graph:
        node.meta = dict(node.meta)
    breaks, expected = BROKEN[name]
    breaks(graph)
    with pytest.raises(VerificationError) as error:
        check_target(graph).raise_if_broken()
    text = str(error.value)
    assert expected in text, text
    assert "rule target: every kernel of the target gets what torch_npu demands" in text
    assert "module 'model.layers.0.mlp" in text or "module 'model.layers.1.mlp" in text
    assert "modeling_mixtral.py:" in text or "moe.py:" in text
    assert "remedy" in text
    assert check_target(hf_for_npu("mixtral", torch.bfloat16, fsdp=2, ep=2).lowered).ok  # only the copy is broken


def test_a_broken_lowering_is_stopped_inside_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a line of the table does wrong never runs."""
    module = importlib.import_module("ep_fx.targets.npu.lower")

    def misuse(graph: ParallelGraph) -> None:
        for node in called(graph, "npu_grouped_matmul"):
            with graph.graph.inserting_before(node):
                half = graph.call(torch.ops.aten.slice.Tensor, node.args[2], 0, 0, 1, like=node,
                                  value=node.args[2].meta["val"][:1])  # type: ignore[union-attr]
            node.update_arg(2, half)

    wrong = Lowering("wrong", "npu_grouped_matmul", (), "none", "none", misuse)
    monkeypatch.setattr(module, "TABLE", (*module.TABLE, wrong))
    with fake_mesh(fsdp=2, ep=2) as mesh, pytest.raises(VerificationError, match="one entry for each local expert"):
        ep_fx.transform(TinyMoE(grouped=True), mesh, example_inputs=(token_ids(0),), target="npu")


@pytest.mark.parametrize(("rows", "holds"), [(0, True), (1, False)])
def test_completed_counts_are_those_of_these_rows(rows: int, holds: bool) -> None:
    """Counts that were completed with the rest of the rows, of the product's own or of others."""
    graph = tiny_for_npu(grouped=True).lowered.copy()
    products = [node for node in called(graph, "npu_grouped_matmul") if len(node.args) < 5 or node.args[4] == 0]
    first = products[0]
    other = next(node for node in products if node.args[2] is not first.args[2])
    counts, weight = (first.args[index].meta["val"] for index in (2, 1))  # type: ignore[union-attr]
    with graph.graph.inserting_before(first if rows == 0 else other):
        completed = graph.call(matmul.rest_counted, first.args[2], (first, other)[rows].args[0], like=first,
                               value=counts.new_empty(counts.shape[0] + 1))  # fmt: skip
        matrices = graph.call(matmul.rest_appended, first.args[1], like=first,
                              value=weight.new_empty((weight.shape[0] + 1, *weight.shape[1:])))  # fmt: skip
    first.args = (first.args[0], matrices, completed, *first.args[3:])
    assert check_target(graph).ok == holds
