"""The text of a graph: stable across processes, complete, free of names that differ between runs."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from ep_fx.graph import Manifest, MeshSpec, ParallelGraph, Phase, Role
from ep_fx.graph.names import value_names
from ep_fx.graph.places import Places
from ep_fx.graph.printer import GraphText, print_graph
from ep_fx.graph.summary import format_summary, summarise
from tests.viz import sample

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def graph() -> ParallelGraph:
    return sample.build()


@pytest.fixture(scope="module")
def text(graph: ParallelGraph) -> str:
    return print_graph(graph)


PRINTING = """
import sys
from torch.distributed.device_mesh import init_device_mesh
import ep_fx
from ep_fx.graph import print_graph
from ep_fx.testing.fake import fake_world
from tests.models.tiny_moe import TinyMoE, token_ids
from tests.viz import sample

sys.stdout.write(print_graph(sample.build()))
with fake_world(4):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    sys.stdout.write(ep_fx.transform(TinyMoE(blocks=1), mesh, example_inputs=(token_ids(0),)).print_graph())
"""


@pytest.mark.timeout(180)  # interpreters start from nothing
def test_same_bytes_in_every_process_whatever_the_hash_seed(text: str) -> None:
    """A graph by hand, and one that went through capture and all passes."""
    printed = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PRINTING]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        printed.append(run.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith(text)
    assert "computes:" in printed[0]


def test_text_does_not_depend_on_fx_names_or_on_group_names(graph: ParallelGraph, text: str) -> None:
    other = graph.copy()
    for index, node in enumerate(reversed(other.graph.nodes)):
        if node.op == "call_function":
            node._rename(f"anything_{index}")
    assert print_graph(other) == text
    for name in (sample.DENSE, sample.FSDP, sample.EXPERT):
        assert f'"{name}"' not in text


def test_every_node_has_one_line_and_a_name_of_its_own(graph: ParallelGraph, text: str) -> None:
    names = value_names(graph, Places(graph))
    assert len(set(names.values())) == len(names) == len(graph.graph.nodes)
    for node in graph:
        if node.op != "output" and node not in graph.nodes(Role.RESHARD):
            assert len(re.findall(rf"^  %{re.escape(names[node])}[: ]", text, re.M)) == 1
    assert text.count("  ep_fx.reshard(") == len(graph.nodes(Role.RESHARD))


def test_a_line_shows_type_operator_group_dims_module_and_source(text: str) -> None:
    left, note = "  %unshard_3: [f32[2, 16, 16]]", "# layers.1.moe.experts (model.py:12)"
    assert f'{left} = ep_fx.unshard([%p4], 2, "fsdp")  {note}' in text
    assert "  %embedding: f32[s0, s1, 16] = aten.embedding(%p0.full, %tokens)  # embed (model.py:12)" in text
    assert "  %regroup: f32[u0, 16] = ep_fx.regroup(%wait_tensor_1, %context.permuted_indices)" in text


def test_the_order_of_an_expert_region_can_be_read_from_the_headings(text: str) -> None:
    forward, backward = text.split("\nbackward:\n")
    region = sample.REGION
    assert _in_order(forward, [f"# {what} {region}" for what in ("gather", "dispatch", "combine", "free")])
    steps = ("gather", "combine backward", "dispatch backward", "free", "reduce gradients of")
    assert _in_order(backward, [f"# {what} {region}" for what in steps])


def _in_order(text: str, parts: list[str]) -> bool:
    positions = [text.index(part) for part in parts]
    return positions == sorted(positions)


def test_placeholders_show_name_layout_and_unit(text: str) -> None:
    assert re.search(r'%p2: f32\[2\] += parameter "layers.0.fc.bias" +f32\[6\], dim 0 cut 3 x 2 \+ 0', text)
    assert "f32[2, 16, 16] of [4, 16, 16] over ep, dim 0 cut 2 x 1 over fsdp; unit layers.1.moe.experts" in text


def test_one_half_keeps_the_names_of_the_whole(graph: ParallelGraph, text: str) -> None:
    backward = print_graph(graph, phase=Phase.BACKWARD)
    assert backward.split("\nbackward:\n")[1] == text.split("\nbackward:\n")[1]
    assert "\nforward:\n" not in backward


def test_types_can_be_left_out(graph: ParallelGraph) -> None:
    assert "  %regroup = ep_fx.regroup(" in print_graph(graph, types=False)


def test_long_runs_of_parameters_are_shortened_and_strings_escaped(graph: ParallelGraph) -> None:
    printer = GraphText(graph)
    placeholders = [node for node in graph if node.op == "placeholder"]
    assert printer.value(placeholders[:6]) == "[%p0..%p5]"
    assert printer.value(placeholders[:2] + placeholders[3:5]) == "[%p0, %p1, %p3, %p4]"
    assert printer.value('say "no"') == r'"say \"no\""'
    assert printer.value(object()) == "<object>"


def test_a_graph_without_facts_prints_too() -> None:
    plain = fx.Graph()
    x = plain.placeholder("x")
    plain.output(((plain.call_function(torch.ops.aten.relu.default, (x,)),), (), ()))
    graph = ParallelGraph(plain, Manifest(MeshSpec({}, {}), (), (), ("x",), (), 1, ()))
    assert "  %relu = aten.relu(%x)" in print_graph(graph)


def test_summary_counts_collectives_by_direction_role_and_group(graph: ParallelGraph) -> None:
    rows = {(row.phase, row.kind, row.dims): row for row in summarise(graph)}
    assert rows[Phase.FORWARD, "unshard", "fsdp,ep"].count == 3
    assert rows[Phase.FORWARD, "unshard", "fsdp"].bytes == 2 * 16 * 16 * 4
    assert rows[Phase.FORWARD, "dispatch counts", "ep"].bytes == 4 * 8
    assert rows[Phase.BACKWARD, "combine backward", "ep"].formula == "64*R"
    assert rows[Phase.BACKWARD, "reduce_grad", "fsdp"].count == 1
    assert "backward   dispatch backward  ep       1      64*R" in format_summary(summarise(graph))


def test_bytes_of_a_reduction_without_recorded_values_come_from_the_layout(graph: ParallelGraph) -> None:
    other = graph.copy()
    for node in other.nodes(phase=Phase.BACKWARD):
        node.meta.pop("val", None)
    row = next(row for row in summarise(other) if row.kind == "reduce_grad" and row.dims == "fsdp")
    assert row.bytes == 1 * 16 * 16 * 4


def test_the_end_of_a_whole_slice_is_not_spelled_out(graph: ParallelGraph) -> None:
    assert GraphText(graph).value([0, 2**63 - 1]) == "[0, max]"
