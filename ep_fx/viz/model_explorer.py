"""A graph as the graph JSON of Google's Model Explorer: layers that open and close, every node with its details.

    {"label": .., "graphs": [{"id": .., "nodes": [{"id", "label", "namespace", "incomingEdges", "attrs",
     "outputsMetadata"}], "groupNodeAttributes": {..}}]}

A namespace is the half of the step, then the module path, then what the node is part of (``gather``, ``dispatch``, ..).
Elements of a result are outputs of the node that made them, so `getitem` nodes are none of their own.
"""

from __future__ import annotations

import json
from typing import Any, cast

from torch import fx

from ep_fx.graph import ParallelGraph, Role, info_of, role_of, target_name
from ep_fx.graph.places import Action
from ep_fx.graph.printer import GraphText
from ep_fx.graph.sizes import TypicalSizes
from ep_fx.graph.texts import mesh_text
from ep_fx.graph.values import bytes_text


def to_model_explorer(graph: ParallelGraph) -> str:
    """The JSON text of a collection with one graph, ``step``."""
    text, sizes = GraphText(graph), TypicalSizes(graph)
    nodes = [_node(node, text, sizes) for node in graph if role_of(node) is not Role.GETITEM]
    step = {"id": "step", "nodes": nodes, "groupNodeAttributes": _groups(graph)}
    return json.dumps({"label": "ep_fx", "graphs": [step]}, separators=(",", ":")) + "\n"


def _groups(graph: ParallelGraph) -> dict[str, dict[str, str]]:
    """What the side panel shows of the whole graph ("") and of its two halves."""
    facts = {"mesh": mesh_text(graph.manifest.mesh), "passes": ", ".join(graph.provides) or "none"}
    policy = graph.manifest
    facts["policy"] = f"grad_reduce={policy.grad_reduce}, expert_reshard={policy.expert_reshard}"
    return {"": facts}


def _node(node: fx.Node, text: GraphText, sizes: TypicalSizes) -> dict[str, Any]:
    info, place = info_of(node), text.places[node]
    attributes = {
        "operator": target_name(node),
        "text": text.line(node, note=False),
        "module": info.fqn,
        "source": info.source,
        "part of": None if place.action is Action.COMPUTE else f"{place.action.value} {place.subject}",
    }
    return {
        "id": text.names[node],
        "label": _label(node, text),
        "namespace": _namespace(node, text),
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": text.names[source], "sourceNodeOutputId": output, "targetNodeInputId": str(index)}
            for index, (source, output) in enumerate(map(_made_by, node.all_input_nodes))
        ],
        "outputsMetadata": _outputs(node, text, sizes),
    }


def _label(node: fx.Node, text: GraphText) -> str:
    if node.op in ("placeholder", "output"):
        spec = text.places.parameters.get(node)
        return spec.name if spec else text.names[node] if node.op == "placeholder" else "output"
    return target_name(node).split("::")[-1]


def _namespace(node: fx.Node, text: GraphText) -> str:
    """``forward/model/layers/0/mlp/experts/dispatch``; placeholders stand with their kind."""
    if node.op == "placeholder":
        return "parameters" if node in text.places.parameters else "inputs"
    if node.op == "output":
        return ""
    place = text.places[node]
    parts = [info_of(node).phase.value, *(part for part in (place.subject or "").split(".") if part)]
    if place.action is not Action.COMPUTE:
        parts.append(place.action.value)
    return "/".join(part.replace("/", "|") for part in parts)


def _made_by(source: fx.Node) -> tuple[fx.Node, str]:
    """The node that computes `source`, and which of its outputs that is."""
    if role_of(source) is not Role.GETITEM:
        return source, "0"
    return cast(fx.Node, source.args[0]), str(source.args[1])


def _outputs(node: fx.Node, text: GraphText, sizes: TypicalSizes) -> list[dict[str, Any]]:
    value = node.meta.get("val")
    parts = dict(enumerate(value)) if isinstance(value, (list, tuple)) else {0: value}
    for user in node.users:  # a result whose type is known at its elements only, such as a context
        if role_of(user) is Role.GETITEM and isinstance(user.args[1], int):
            parts.setdefault(user.args[1], None)
            parts[user.args[1]] = user.meta.get("val", parts[user.args[1]])
    found = []
    for index, part in sorted(parts.items()):
        size = sizes.bytes(part)
        facts = {"type": text.symbols.type(part), "bytes": bytes_text(size) if size else ""}
        attributes = [{"key": key, "value": fact} for key, fact in facts.items() if fact]
        found.append({"id": str(index), "attrs": attributes})
    return found
