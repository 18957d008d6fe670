"""``.json``: the graph JSON of Google's Model Explorer, checked field by field against its published data structures.

The format is that of ``graph_builder.py`` of ai-edge-model-explorer: every field that may stand in an object, and its
type. The viewer takes a file for a collection where it has ``label`` and ``graphs``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.graph.printer import GraphText
from ep_fx.viz import to_model_explorer

KEY_VALUE = {"key": str, "value": str}
METADATA = {"id": str, "attrs": [KEY_VALUE]}
EDGE = {"sourceNodeId": str, "sourceNodeOutputId": str, "targetNodeInputId": str}
NODE = {
    "id": str, "label": str, "namespace": str, "subgraphIds": [str], "attrs": [KEY_VALUE], "incomingEdges": [EDGE],
    "outputsMetadata": [METADATA], "inputsMetadata": [METADATA],
}
GRAPH = {"id": str, "nodes": [NODE], "groupNodeAttributes": dict}
COLLECTION = {"label": str, "graphs": [GRAPH]}
REQUIRED = {"id", "key", "value", "sourceNodeId", "label", "graphs", "nodes"}


def check(value: Any, form: Any, where: str = "file") -> None:
    """`value` has no field that `form` lacks, every required one, and each has its type."""
    if isinstance(form, type):
        assert isinstance(value, form), f"{where}: {value!r} is no {form.__name__}"
    elif isinstance(form, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            check(item, form[0], f"{where}[{index}]")
    else:
        assert isinstance(value, dict), where
        assert set(value) <= set(form), f"{where}: {set(value) - set(form)}"
        assert set(form) & REQUIRED <= set(value), f"{where}: {set(form) & REQUIRED - set(value)}"
        for name, item in value.items():
            check(item, form[name], f"{where}.{name}")


@pytest.fixture(scope="module")
def collection(graph: ParallelGraph) -> dict[str, Any]:
    return json.loads(to_model_explorer(graph))  # type: ignore[no-any-return]


def test_every_field_is_one_of_the_published_format(collection: dict[str, Any]) -> None:
    check(collection, COLLECTION)
    panel = collection["graphs"][0]["groupNodeAttributes"]
    assert panel[""]["mesh"].startswith("fsdp 2 x ep 2")
    assert all(isinstance(text, str) for facts in panel.values() for text in facts.values())


def test_all_nodes_but_elements_of_results_are_there_once_and_edges_lead_to_outputs(
    graph: ParallelGraph, collection: dict[str, Any]
) -> None:
    nodes = {node["id"]: node for node in collection["graphs"][0]["nodes"]}
    names = GraphText(graph).names
    assert list(nodes) == [names[node] for node in graph if role_of(node) is not Role.GETITEM]
    for node in nodes.values():
        for edge in node["incomingEdges"]:
            outputs = {item["id"] for item in nodes[edge["sourceNodeId"]]["outputsMetadata"]}
            assert edge["sourceNodeOutputId"] in outputs


def test_namespaces_are_the_half_the_module_path_and_the_part(collection: dict[str, Any]) -> None:
    spaces = {node["namespace"] for node in collection["graphs"][0]["nodes"]}
    assert {
        "parameters", "inputs", "forward/layers/1/moe/experts/dispatch", "backward/layers/1/moe/experts/reduce"
    } <= spaces
