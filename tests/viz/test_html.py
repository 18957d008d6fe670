"""The page: needs no network, holds every node, cannot be broken out of, and is small enough for 20,000 nodes."""
from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ep_fx.graph import ParallelGraph, PassManager
from ep_fx.graph.printer import print_graph
from ep_fx.passes import default_pipeline
from ep_fx.testing.synthetic import logical_step
from ep_fx.viz import html, to_html
from ep_fx.viz.model import EdgeKind, Kind, Lane
from tests.viz import synthetic

SCRIPTS = Path(html.__file__).parent / "templates" / "js"


class Page(HTMLParser):
    """Collects elements and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
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

    @property
    def data(self) -> dict[str, Any]:
        """What the page shows."""
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


@pytest.fixture(scope="module")
def page(graph: ParallelGraph) -> str:
    return to_html(graph)


def test_loads_nothing(page: str) -> None:
    assert not re.search(r"https?://", page)
    for tag, attributes in Page(page).tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert "src" not in attributes
        assert not attributes.get("href")
    assert "@import" not in page
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\s*\(", page)


def test_holds_every_node_the_text_form_and_the_table_of_collectives(page: str, graph: ParallelGraph) -> None:
    data = Page(page).data
    assert len(data["nodes"]["name"]) == len(set(data["nodes"]["name"])) == len(graph.graph.nodes)
    assert data["text"] == print_graph(graph)
    assert "backward   reduce_grad" in data["summary"]


def test_hostile_names_stay_text() -> None:
    page = Page(to_html(synthetic.hostile()))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not any("alert(1)" in script for script in page.scripts[1:])
    assert any(synthetic.HOSTILE[:-1] in text for text in page.data["strings"])


def test_ids_are_unique(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Page(page).tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_id_that_a_script_asks_for_is_on_the_page(page: str) -> None:
    ids = {attributes["id"] for _, attributes in Page(page).tags if "id" in attributes}
    wanted = set(re.findall(r"(?:byId|getElementById)\('([\w-]+)'\)", page))
    assert len(wanted) > 10
    assert wanted <= ids


def test_twenty_thousand_nodes_stay_below_six_megabytes() -> None:
    """Bytes are linear in the nodes; the browser tests weigh the real page of 20,000."""
    manager = PassManager(default_pipeline())
    graph = manager.run(logical_step(10))
    size = len(to_html(graph, manager.records, manager.history)) - len(html.bundle(SCRIPTS / "main.js"))
    assert 20_000 * size / len(graph.graph.nodes) < 6_000_000


# -- scripts -----------------------------------------------------------------------------------------------------------
def test_every_import_of_a_script_is_exported_by_its_module() -> None:
    for script in SCRIPTS.glob("*.js"):
        for names, module in re.findall(r"^import \{([^}]*)\} from '\./([\w-]+)\.js';", script.read_text(), re.M):
            source = (SCRIPTS / f"{module}.js").read_text()
            exported = set(re.findall(r"^export (?:const|class|function) (\w+)", source, re.M))
            assert {name.strip() for name in names.split(",")} <= exported, (script.name, module)


def test_the_bundle_holds_each_module_once_after_what_it_imports() -> None:
    bundle = html.bundle(SCRIPTS / "main.js")
    modules = re.findall(r"^const (\w+)_js = \(\(\) => \{$", bundle, re.M)
    assert sorted(modules) == sorted(script.stem for script in SCRIPTS.glob("*.js"))
    for script in SCRIPTS.glob("*.js"):
        for imported in re.findall(r"from '\./([\w-]+)\.js'", script.read_text()):
            assert modules.index(imported) < modules.index(script.stem)
    assert not re.search(r"^(import|export) ", bundle, re.M)


def test_the_scripts_number_kinds_arrows_and_lanes_as_the_data_do() -> None:
    source = (SCRIPTS / "model.js").read_text()
    for name, members in {"KIND": Kind, "EDGE": EdgeKind, "LANE": Lane}.items():
        table = re.search(rf"export const {name} = \{{(.*?)\}};", source, re.S)
        assert table is not None
        numbers = {key: int(number) for key, number in re.findall(r"(\w+): (\d+)", table[1])}
        names = [member.value for member in members]
        assert [*numbers.values()] == [*range(len(names))]
        assert [key.replace("spine", "context") for key in numbers] == names


def test_scripts_are_short() -> None:
    """Files of about 200 lines: none is a blob."""
    for script in SCRIPTS.glob("*.js"):
        lines = script.read_text().splitlines()
        assert len(lines) < 280, script.name
        assert max(map(len, lines)) <= 120, script.name
