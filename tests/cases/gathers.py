"""Which parameters a graph gathers, read from the graph: through the padding and assembling of shards."""
from __future__ import annotations

from collections import Counter

from torch import fx

from ep_fx.graph import ParallelGraph, Phase, Role


def gathered(graph: ParallelGraph, phase: Phase) -> Counter[str]:
    """How often each parameter, by its placeholder's name, is gathered in `phase`."""
    return Counter(name for node in graph.nodes(Role.UNSHARD, phase) for name in _shards(node))


def _shards(unshard: fx.Node) -> list[str]:
    names = []
    for shard in unshard.args[0]:  # type: ignore[union-attr]
        while shard.op != "placeholder":  # type: ignore[union-attr]
            shard = shard.args[0]  # type: ignore[union-attr, assignment]
        names.append(str(shard.target))  # type: ignore[union-attr]
    return names
