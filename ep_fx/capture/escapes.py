"""What a rank computes from its own experts alone leaves them through combine only; anything else is refused.

    fine     y = combine(f(dispatch(x), w))     broken     w.square().sum() as an output: of the rank's experts only

Such a value has the right type and another content on every rank, so nothing later could notice. One walk, O(nodes).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ep_fx.capture.experts import Experts
from ep_fx.graph import ParallelGraph, Phase, Role, alias_root, info_of, role_of
from ep_fx.graph.effects import written_by


def refuse_escapes(graph: ParallelGraph, experts: Sequence[Experts]) -> None:
    """Checks the forward part of a graph that no pass has touched.

    Raises:
        ValueError: an output, or what is written to a buffer, is made from weights or rows of experts that are split
            over ``ep``, without a combine on the way; names them, module path and source line.
    """
    split = {name: item for item in experts if item.ep > 1 for name in item.parameters}
    if not split:
        return
    local = {node: split[spec.name] for node, spec in graph.parameter_nodes().items() if spec.name in split}
    given = set(local)
    regions = {item.path: item for item in experts if item.ep > 1}
    written: dict[fx.Node, Experts] = {}
    buffers = {b.placeholder for b in graph.manifest.buffers}
    for node in graph:
        if node.op != "call_function" or info_of(node).phase is not Phase.FORWARD or role_of(node) is Role.COMBINE:
            continue
        if role_of(node) is Role.DISPATCH:
            origin = regions.get(str(node.args[-1]))
        else:
            origin = next((found for n in node.all_input_nodes if (found := _origin(n, local, written))), None)
        if origin is None:
            continue
        local[node] = origin
        if role_of(node) is Role.DISPATCH or (role_of(node) is Role.GETITEM and node.args[0] in given):
            given.add(node)
        for root in (root for target in written_by(node) for root in alias_root(target)):
            written[root] = origin
            if root.name in buffers:
                raise _refusal(_first(node, local, given), origin, f"buffer {root.name.removeprefix('buffer_')!r}")
    for index, output in enumerate(graph.outputs):
        if isinstance(output, fx.Node) and (origin := _origin(output, local, written)):
            raise _refusal(_first(output, local, given), origin, f"output {index}")


def _origin(node: fx.Node, local: dict[fx.Node, Experts], written: dict[fx.Node, Experts]) -> Experts | None:
    """The experts that `node` holds values of, by how it was made or by what was written to its memory."""
    if node in local or not written:
        return local.get(node)
    return next((written[root] for root in alias_root(node) if root in written), None)


def _first(node: fx.Node, local: dict[fx.Node, Experts], given: set[fx.Node]) -> fx.Node:
    """The first computation on one way from weights and rows as they are `given` to `node`."""
    while True:
        before = next((n for n in node.all_input_nodes if n in local and n not in given), None)
        if before is None:
            return node
        node = before


def _refusal(first: fx.Node, experts: Experts, end: str) -> ValueError:
    info = info_of(first)
    held = experts.num_experts // experts.ep
    return ValueError(
        f"{info.fqn or 'the model'} ({info.source or 'source unknown'}): {end} is computed from weights or rows of "
        f"{experts.path}, of whose {experts.num_experts} experts a rank holds {held}, and would be another on every "
        "rank; expected: what the experts return. A penalty on weights can be computed after forward from the module's "
        "parameters, which are whole as DTensors"
    )
