"""Backward reads no forward view or cast of a sharded parameter: it makes its own, from the parameter.

    before   c = _to_copy(param)  y = mul(x, c)  ...  gx = mul(gy, c)
    after    c = _to_copy(param)  y = mul(x, c)  ...  c1 = _to_copy(param)  gx = mul(gy, c1)

So the gather of backward serves the making of `c1`, not its readers, and may end before them. Each is made once, just
before its first reader.
"""

from __future__ import annotations

from torch import fx

from ep_fx.graph import ParallelGraph, Phase, copy_info, info_of
from ep_fx.passes._uses import ParameterUses, is_size


def make_again_in_backward(graph: ParallelGraph, nodes: dict[str, fx.Node]) -> None:
    """Lets what backward reads of each sharded parameter begin at its placeholder in backward.

    Args:
        nodes: placeholder of each parameter name.
    """
    uses = ParameterUses(graph, nodes)
    again = {node: node for node in nodes.values()}
    sharded = (p.name for unit in graph.manifest.units.values() for p in unit if p.layout.gather_dims)
    for name in sharded:
        for reader in uses.readers.get((name, Phase.BACKWARD), ()):
            for source in uses.reads(reader):
                if uses.derived[source] == name and _is_of_forward(source):
                    reader.replace_input_with(source, _made_again(graph, uses, source, again, reader))


def _is_of_forward(source: fx.Node) -> bool:
    return source.op != "placeholder" and info_of(source).phase is Phase.FORWARD


def _made_again(
    graph: ParallelGraph, uses: ParameterUses, source: fx.Node, again: dict[fx.Node, fx.Node], before: fx.Node
) -> fx.Node:
    """A backward twin of the chain of views and casts that ends in `source`, made at its first use."""
    if source not in again:
        parent = _made_again(graph, uses, uses.parents[source], again, before)
        with graph.graph.inserting_before(before):
            again[source] = graph.graph.node_copy(source, lambda node: node if is_size(node) else parent)
        copy_info(again[source], source, phase=Phase.BACKWARD)
    return again[source]
