"""From graph to boxes and arrows: nothing is lost, folding keeps the dialect visible and makes no cycle."""
from __future__ import annotations

from collections import Counter

import pytest

from ep_fx.graph import ParallelGraph, Phase, Role
from ep_fx.graph.names import value_names
from ep_fx.graph.places import Places
from ep_fx.viz import Picture, build_picture
from ep_fx.viz.model import EdgeKind, Kind, PictureNode
from tests.viz import sample, synthetic

BOTH = pytest.mark.parametrize("fold", [True, False])


def box(picture: Picture, title: str, phase: Phase = Phase.FORWARD) -> int:
    """Index of the one box with that title in that half."""
    found = [i for i, n in enumerate(picture.nodes) if n.title == title and n.phase is phase]
    assert len(found) == 1, f"{title}: {len(found)} boxes"
    return found[0]


def arrows(picture: Picture, kind: EdgeKind) -> set[tuple[int, int]]:
    return {(edge.source, edge.target) for edge in picture.edges if edge.kind is kind}


@BOTH
def test_every_node_is_in_a_box(graph: ParallelGraph, fold: bool) -> None:
    picture = build_picture(graph, fold=fold)
    members = Counter(name for node in picture.nodes for name in node.members)
    names = value_names(graph, Places(graph))
    assert set(members) == set(names.values())
    assert all(count == 1 for name, count in members.items() if name != "output")


@BOTH
def test_data_arrows_point_forward(graph: ParallelGraph, fold: bool) -> None:
    """Arrows between boxes can then form no cycle."""
    assert all(edge.source < edge.target for edge in build_picture(graph, fold=fold).edges)


def test_folding_keeps_each_collective_and_context_in_a_box_of_its_own(graph: ParallelGraph, folded: Picture) -> None:
    kinds = Counter(node.kind for node in folded.nodes)
    assert kinds[Kind.UNSHARD] == len(graph.nodes(Role.UNSHARD))
    assert kinds[Kind.RESHARD] == len(graph.nodes(Role.RESHARD))
    assert kinds[Kind.REDUCE] == len(graph.nodes(Role.REDUCE_GRAD))
    assert kinds[Kind.CONTEXT] == 1
    assert kinds[Kind.DISPATCH] + kinds[Kind.COMBINE] + kinds[Kind.EXCHANGE] == len(graph.nodes(Role.EXCHANGE))


def test_folding_shrinks_and_unfolding_does_not(graph: ParallelGraph, folded: Picture, unfolded: Picture) -> None:
    assert len(folded.nodes) < len(graph.graph.nodes) / 2
    assert len(unfolded.nodes) == len(graph.graph.nodes) + 1            # the output has a box in each half


def test_context_arrows_go_from_the_context_to_dispatch_combine_and_both_backwards(folded: Picture) -> None:
    context = box(folded, "dispatch context")
    targets = [folded.nodes[b] for a, b in arrows(folded, EdgeKind.CONTEXT) if a == context]
    assert {(node.title, node.phase) for node in targets} >= {
        ("dispatch", Phase.FORWARD), ("combine", Phase.FORWARD),
        ("dispatch backward", Phase.BACKWARD), ("combine backward", Phase.BACKWARD),
    }


def test_order_arrows_hold_the_region_between_its_gather_and_its_free(folded: Picture) -> None:
    order = arrows(folded, EdgeKind.EFFECT)
    assert (box(folded, "unshard moe.experts"), box(folded, "dispatch")) in order
    assert (box(folded, "combine"), box(folded, "reshard moe.experts")) in order
    backward = Phase.BACKWARD
    gather, first = box(folded, "unshard moe.experts", backward), box(folded, "combine backward", backward)
    assert (gather, first) in order


def test_values_kept_for_backward_are_told_apart(folded: Picture) -> None:
    for source, target in arrows(folded, EdgeKind.SAVED):
        assert not folded.nodes[source].is_backward
        assert folded.nodes[target].is_backward


def test_boxes_say_what_moves_over_which_dimensions(folded: Picture) -> None:
    unshard = folded.nodes[box(folded, "unshard layers.0")]
    assert unshard.subtitle == "2 parameters \u00b7 all-gather fsdp,ep"
    reduce = folded.nodes[box(folded, "reduce moe.experts", Phase.BACKWARD)]
    assert reduce.subtitle == "1 gradient \u00b7 reduce-scatter fsdp \u00b7 \u00f7 4"
    assert ("parameters", "layers.0.fc.weight, layers.0.fc.bias") in unshard.details
    assert dict(folded.nodes[box(folded, "dispatch")].details)["collective"] == "all-to-all ep"


def test_backward_stands_in_the_band_of_its_forward(folded: Picture) -> None:
    bands = {node.title: node.band for node in folded.nodes if not node.is_backward}
    backward = [node for node in folded.nodes if node.is_backward and node.title in ("moe.router", "fc", "head")]
    assert len(backward) == 3
    assert all(bands[node.title] == node.band for node in backward)


def test_a_wait_that_compute_overlaps_has_a_box_of_its_own(graph: ParallelGraph) -> None:
    moved = graph.copy()
    expert = next(n for n in moved.nodes(Role.UNSHARD) if "experts" in str(n.args[0]))
    first = next(n for n in moved if n.op == "call_function" and "relu" in str(n.target))
    first.prepend(expert)
    picture = build_picture(moved)
    wait = picture.nodes[box(picture, "wait: gather moe.experts")]
    early = next(n for n in picture.nodes if n.kind is Kind.UNSHARD and n.module == sample.REGION and not n.is_backward)
    assert (wait.kind, wait.band, early.band) == (Kind.WAIT, "layers.1", "layers.0")


def test_logical_dispatch_and_combine_show_too() -> None:
    picture = build_picture(sample.build_logical())
    pairs = arrows(picture, EdgeKind.CONTEXT)
    assert (box(picture, "dispatch"), box(picture, "combine")) in pairs


def test_details_name_the_lines_of_the_text(folded: Picture) -> None:
    def lines(node: PictureNode) -> str:
        return dict(node.details)["nodes"]

    assert "ep_fx.grouped_mm(%regroup, %p4.full" in lines(folded.nodes[box(folded, "moe.experts")])


def test_a_graph_without_blocks_or_facts_has_one_band() -> None:
    picture = build_picture(synthetic.hostile())
    assert len({node.band for node in picture.nodes}) == 1
