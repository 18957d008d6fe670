"""Every node of a lowered graph has a class, and MoE regions hold no fallback, forward and backward."""
from __future__ import annotations

import sys

import pytest
import torch

import ep_fx
from ep_fx.graph import Role, info_of, is_collective, role_of
from ep_fx.targets.npu import table
from ep_fx.targets.npu.coverage import FallbackError, Kind, coverage, region_nodes, require_kernels
from ep_fx.targets.npu.kernels import COMPOSITIONS, KERNELS
from ep_fx.targets.npu.lower import lower
from ep_fx.targets.npu.lowerings import GROUPED_MM
from ep_fx.testing.synthetic import logical_step, parallel_step
from tests.npu.lowered import hf_for_npu, layer_for_npu, tiny_for_npu


def test_a_region_is_all_that_lies_between_its_exchanges() -> None:
    """Routing, products and activation are inside, in both directions; attention and routers are not."""
    graph = layer_for_npu("mixtral", fsdp=2, ep=2).lowered
    inside = region_nodes(graph)
    assert set(inside.values()) == {"model.layers.0.mlp.experts"}
    kernels = {"npu_grouped_matmul", "npu_swiglu", "npu_swiglu_backward"}
    for node in graph:
        module = info_of(node).fqn or ""
        if getattr(node.target, "__name__", "") in kernels:
            assert inside[node] in module
        if "self_attn" in module or "layernorm" in module or module.endswith("mlp.gate"):
            assert node not in inside
    exchanged = [node for node in graph if role_of(node) is Role.EXCHANGE]
    assert len([node for node in exchanged if node in inside]) == len(exchanged) - 1  # counts travel before


def test_every_call_has_a_row_and_its_class() -> None:
    graph = layer_for_npu("mixtral", fsdp=2, ep=2).lowered
    nodes = [node for node in graph if node.op == "call_function"]
    rows = coverage(graph)
    assert len(rows) == len(nodes)
    for node, row in zip(nodes, rows, strict=True):
        name = getattr(node.target, "__name__", "")
        assert (row.kind is Kind.KERNEL) == (KERNELS.get(name) is node.target)
        assert (row.kind is Kind.COLLECTIVE) >= is_collective(node)
        assert row.kind is Kind.COMPOSITION or COMPOSITIONS.get(name) is not node.target


def test_a_line_that_is_missing_is_a_fallback_inside_of_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer_for_npu("mixtral", fsdp=2, ep=2)
    lines = tuple(line for line in table.TABLE if line is not GROUPED_MM)
    monkeypatch.setattr(sys.modules["ep_fx.targets.npu.lower"], "TABLE", lines)
    rows = coverage(lower(module.graph))
    with pytest.raises(FallbackError) as error:
        require_kernels(rows)
    text = str(error.value)
    assert text.startswith("4 nodes inside of MoE regions have no kernel on the NPU; expected none:")
    assert "ep_fx.grouped_mm_backward, backward of 'model.layers.0.mlp.experts', module 'model.layers" in text
    assert "modeling_mixtral.py:" in text


def test_an_operator_that_runs_on_the_cpu_is_found_inside_of_regions() -> None:
    graph = layer_for_npu("mixtral", fsdp=2, ep=2).lowered.copy()
    swiglu = next(node for node in graph if node.target is KERNELS["npu_swiglu"])
    with graph.graph.inserting_after(swiglu):
        logit = graph.call(torch.ops.aten.logit.default, swiglu, like=swiglu, value=swiglu.meta["val"])
    swiglu.replace_all_uses_with(logit, delete_user_cb=lambda user: user is not logit)
    with pytest.raises(FallbackError, match=r"%logit = aten\.logit, forward of .*torch_npu has no kernel of it"):
        require_kernels(coverage(graph))
    assert [row.kind for row in coverage(graph) if row.node == "logit"] == [Kind.CPU]


def test_what_was_kept_names_the_line_and_the_reason() -> None:
    rows = coverage(tiny_for_npu(torch.float64, blocks=1, grouped=True).lowered)
    kept = [row for row in rows if row.target == "ep_fx.grouped_mm"]
    assert len(kept) == 3
    assert all(row.kind is Kind.FALLBACK and "grouped_mm: " in (row.reason or "") for row in kept)
    assert all("float64" in (row.reason or "") and row.region for row in kept)


def test_explain_shows_it_for_any_graph() -> None:
    """On the CPU too, also before the exchange is made explicit."""
    for graph in (logical_step(1), parallel_step(1)):
        answer = ep_fx.explain(graph).lowering()
        assert answer.is_covered
        assert "npu.npu_grouped_matmul" in str(answer)
        assert len(answer.to_json()) == len(answer.rows)
    found = ep_fx.explain(tiny_for_npu(torch.float64, blocks=1, grouped=True)).lowering()
    assert not found.is_covered
    assert "NOT all of it runs on the device" in str(found)
    assert "left by the lowering" in str(found)
    with pytest.raises(FallbackError):
        found.require_kernels()


def test_explain_shows_what_only_a_run_decides() -> None:
    """Once for layers that are alike, and each node of its own as JSON."""
    answer = ep_fx.explain(hf_for_npu("mixtral", torch.bfloat16, fsdp=2, ep=2)).lowering()
    assert [table.title for table in answer.tables()] == ["lowering to npu", "conditions of the run"]
    *_, table = answer.tables()
    rows = [row for row in table.rows if row[1] == "npu.npu_moe_token_permute"]
    assert [(row[0], row[2:4], row[5]) for row in rows if row[3] == "indices.numel() = u"] == [
        ("model.layers.[0-1].mlp.experts (2x)", ("indices: below 16777215 indices", "indices.numel() = u"), "1")
    ]
    assert "16777215" in str(answer)
    found = answer.conditions_to_json()
    assert len(found) == len(answer.conditions) > len(table.rows)
    (first,) = (c for c in found if c["target"] == "npu.npu_moe_token_permute" and c["size"] == "indices.numel() = u0")
    assert (first["limit"], first["unit"], first["module"]) == (16777215, "indices", "model.layers.0.mlp.experts")
    assert "modeling_mixtral.py" in first["source"]
