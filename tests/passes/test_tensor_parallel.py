"""The pass `tensor-parallel`: what it replaces, and how its nodes look as text and in every picture."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from ep_fx import EPModule
from ep_fx.graph import ParallelGraph, Phase, Role, graph_equal, parse_graph
from ep_fx.testing.fake import fake_world
from ep_fx.verify import verify
from ep_fx.viz import build_picture
from ep_fx.viz.model import Kind
from tests.capturing import captured
from tests.models.tiny_moe import TinyMoE, token_ids


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[EPModule, ParallelGraph]]:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        yield captured(TinyMoE(blocks=1, grouped=True, scores="keyword"), mesh, token_ids(0))


def test_sums_become_all_reduces_and_shares_nothing(both: tuple[EPModule, ParallelGraph]) -> None:
    module, logical = both
    graph = module.graph
    assert "tensor-parallel" in graph.provides
    assert [len(logical.nodes(role)) for role in (Role.TP_SHARE, Role.TP_SUM, Role.ALL_REDUCE)] == [3, 3, 0]
    assert [len(graph.nodes(role)) for role in (Role.TP_SHARE, Role.TP_SUM)] == [0, 0]
    sums = {phase: graph.nodes(Role.ALL_REDUCE, phase) for phase in Phase}
    assert [len(sums[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD)] == [1, 2]  # rows and scores enter
    assert {n.args[1:] for nodes in sums.values() for n in nodes} == {("sum", graph.manifest.mesh.group("tp"))}


def test_text_says_what_is_cut_and_reads_back(both: tuple[EPModule, ParallelGraph]) -> None:
    text = both[0].print_graph()
    assert "f32[2, 16, 16] of [4, 32, 16] over ep, dim 1 over tp, whole" in text
    assert text.count("c10d.all_reduce(") == 3
    assert text.count("# sum over tp blocks.0.moe.experts") == 2  # one in each direction
    again = parse_graph(text)
    assert graph_equal(again, both[0].graph)
    assert verify(again).ok


@pytest.mark.parametrize("suffix", [".svg", ".html", ".dot", ".txt", ".md", ".json", ".graphml", ".perfetto.json"])
def test_every_picture_can_be_drawn(both: tuple[EPModule, ParallelGraph], suffix: str, tmp_path: Path) -> None:
    text = both[0].visualize(tmp_path / f"graph{suffix}").read_text()
    assert "all_reduce" in text or "all-reduce" in text


def test_a_sum_has_a_box_of_its_own(both: tuple[EPModule, ParallelGraph]) -> None:
    boxes = [node for node in build_picture(both[0].graph).nodes if node.kind is Kind.SUM]
    assert [(box.title, box.subtitle.split(" \u00b7 ")[0]) for box in boxes[:1]] == [("sum over tp", "all-reduce tp")]
    assert len(boxes) == 3
