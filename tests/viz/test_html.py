"""The page: needs no network, holds every node, cannot be broken out of."""
from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from ep_fx.graph import ParallelGraph
from ep_fx.graph.printer import print_graph
from ep_fx.viz import html, to_html
from tests.viz import synthetic


class Page(HTMLParser):
    """Collects elements and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] == "script":
            self.scripts[-1] += data
        self.text += data


@pytest.fixture(scope="module")
def page(graph: ParallelGraph) -> str:
    return to_html(graph)


def test_loads_nothing(page: str) -> None:
    without_names = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://", without_names)
    for tag, attributes in Page(page).tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert "src" not in attributes
        assert not attributes.get("href")
    assert "@import" not in page
    assert "fetch(" not in page


def test_holds_both_pictures_with_details_of_every_node(page: str, graph: ParallelGraph) -> None:
    views = json.loads(Page(page).scripts[0])
    assert len(views) == 2
    everything = {name for node in views[1] for name in node["members"]}
    assert everything == {name for node in views[0] for name in node["members"]}
    assert len(everything) == len(graph.graph.nodes)
    unshard = next(node for node in views[0] if node["title"] == "unshard layers.0")
    assert {"module", "collective", "bytes", "parameters", "nodes"} <= {label for label, _ in unshard["details"]}


def test_boxes_of_the_drawing_and_the_details_go_together(page: str) -> None:
    drawn = [int(a["data-box"] or -1) for _, a in Page(page).tags if "data-box" in a]
    views = json.loads(Page(page).scripts[0])
    assert sorted(drawn) == sorted(i for view in views for i in range(len(view)))


def test_shows_the_text_form_and_the_table_of_collectives(page: str, graph: ParallelGraph) -> None:
    text = Page(page).text
    assert print_graph(graph) in text
    assert "backward   reduce_grad" in text


def test_hostile_names_stay_text() -> None:
    page = Page(to_html(synthetic.hostile()))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not any("alert(1)" in script for script in page.scripts[1:])
    assert synthetic.HOSTILE[:-1] in json.dumps(json.loads(page.scripts[0])).encode().decode("unicode_escape")


def test_ids_are_unique(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Page(page).tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_very_large_graph_is_shown_folded_only(monkeypatch: pytest.MonkeyPatch, graph: ParallelGraph) -> None:
    monkeypatch.setattr(html, "MOST_NODES", 10)
    assert len(json.loads(Page(to_html(graph)).scripts[0])) == 1
