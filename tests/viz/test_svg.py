"""Drawings: valid XML, nothing overlaps, names are escaped, the same bytes each time, fast."""
from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from ep_fx.graph import ParallelGraph
from ep_fx.viz import Picture, build_picture, to_svg
from ep_fx.viz.layout import Rect, lay_out
from ep_fx.viz.metrics import shortened, text_width
from ep_fx.viz.model import Kind
from tests.viz import synthetic

SVG = "{http://www.w3.org/2000/svg}"


def overlapping(boxes: list[Rect]) -> list[tuple[Rect, Rect]]:
    return [
        (a, b) for a, b in combinations(boxes, 2)
        if a.x < b.x + b.w - 0.01 and b.x < a.x + a.w - 0.01 and a.y < b.y + b.h - 0.01 and b.y < a.y + a.h - 0.01
    ]


@pytest.mark.parametrize("fold", [True, False])
def test_valid_xml_with_one_box_for_each_of_the_picture(graph: ParallelGraph, fold: bool) -> None:
    picture = build_picture(graph, fold=fold)
    root = ET.fromstring(to_svg(picture))
    assert root.attrib["style"] == "max-width:100%;height:auto"  # no wider than the window, in proportion
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    boxes = [element for element in root.iter(f"{SVG}g") if "data-box" in element.attrib]
    assert sorted(int(b.attrib["data-box"]) for b in boxes) == list(range(len(picture.nodes)))
    paths = [element for element in root.iter(f"{SVG}path") if "data-from" in element.attrib]
    assert len(paths) == len(picture.edges)


@pytest.mark.parametrize("fold", [True, False])
def test_no_two_boxes_overlap_and_all_lie_inside(graph: ParallelGraph, fold: bool) -> None:
    layout = lay_out(build_picture(graph, fold=fold))
    assert not overlapping(layout.boxes)
    for rect in layout.boxes:
        assert rect.x >= 0
        assert rect.y >= 0
        assert rect.x + rect.w <= layout.width
        assert rect.y + rect.h <= layout.height


def test_forward_runs_down_and_backward_runs_up_beside_it(folded: Picture) -> None:
    layout = lay_out(folded)
    for edge in folded.edges:
        a, b = folded.nodes[edge.source], folded.nodes[edge.target]
        if a.phase is b.phase and a.lane is b.lane:
            down = layout.boxes[edge.target].y > layout.boxes[edge.source].y
            assert down is not a.is_backward
    forward = max(r.x + r.w for r, n in zip(layout.boxes, folded.nodes, strict=True) if not n.is_backward)
    assert all(r.x > forward for r, n in zip(layout.boxes, folded.nodes, strict=True) if n.is_backward)


def test_the_backward_of_a_block_stands_beside_its_forward(folded: Picture) -> None:
    layout = lay_out(folded)
    for label, band in layout.bands:
        for rect, node in zip(layout.boxes, folded.nodes, strict=True):
            assert (node.band == label) is (band.y <= rect.y < band.y + band.h)


def test_boxes_of_the_main_lane_stand_below_one_another(folded: Picture) -> None:
    layout = lay_out(folded)
    middles = {round(r.cx) for r, n in zip(layout.boxes, folded.nodes, strict=True) if n.kind is Kind.DISPATCH}
    assert len(middles) == 2                                            # one for each half


def test_hostile_names_are_escaped() -> None:
    svg = to_svg(build_picture(synthetic.hostile()))
    texts = " ".join(ET.fromstring(svg).itertext())
    assert "<script>" not in svg
    assert "</script>" in texts


def test_the_same_graph_gives_the_same_bytes(graph: ParallelGraph, folded: Picture) -> None:
    assert to_svg(build_picture(graph)) == to_svg(folded)


@pytest.mark.parametrize("fold", [True, False])
def test_two_thousand_nodes_are_drawn_in_five_seconds(fold: bool) -> None:
    graph = synthetic.layers(count=40, per_layer=25)
    assert len(graph.graph.nodes) > 2000
    started = time.process_time()
    picture = build_picture(graph, fold=fold)
    svg = to_svg(picture)
    assert time.process_time() - started < 5
    assert not overlapping(lay_out(picture).boxes[:400])
    assert svg.count('class="node ') == len(picture.nodes)


def test_texts_are_cut_to_the_room_that_they_have() -> None:
    assert shortened("short", 200, 12) == "short"
    cut = shortened("model.layers.0.mlp.experts.gate_up_proj", 120, 12, keep_end=True)
    assert cut.startswith("\u2026")
    assert cut.endswith("proj")
    assert text_width(cut, 12) <= 120


@pytest.mark.parametrize("fold", [True, False])
def test_no_two_labels_of_the_drawing_meet(graph: ParallelGraph, fold: bool) -> None:
    """Boxes of texts, with widths that no common sans-serif font exceeds; bands, headline and legend included."""
    labels = [label_box(text) for text in ET.fromstring(to_svg(build_picture(graph, fold=fold))).iter(f"{SVG}text")]
    assert len(labels) > 50
    assert overlapping(labels) == []


def label_box(text: ET.Element) -> Rect:
    sizes = {"t": (12.5, True), "sub": (10.5, False), "note": (12.0, text.get("font-weight") == "600")}
    known = sizes.get(text.get("class", ""), (float(text.get("font-size", "12")), True))
    width, size = text_width("".join(text.itertext()), *known), known[0]
    x = float(text.get("x", "0")) - (width / 2 if text.get("text-anchor") == "middle" else 0)
    return Rect(x, float(text.get("y", "0")) - 0.75 * size, width, size)
