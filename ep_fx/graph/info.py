"""What is known about one node: the typed record in ``node.meta["ep_fx"]``.

    phase    forward or backward half of the joint graph
    fqn      path of the module whose forward traced the node ("" is the root)
    source   "file.py:123", the user's line

A `NodeInfo` helps a reader; it is never evidence for a rule, which reads targets and arguments only.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import cast

from torch import fx

_KEY = "ep_fx"


class Phase(Enum):
    """Half of the joint graph that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Where a node comes from.

    Args:
        phase: forward or backward.
        fqn: module path, None where no module is known.
        source: ``file:line`` of the user's code, None where it is not known.
    """

    phase: Phase = Phase.FORWARD
    fqn: str | None = None
    source: str | None = None


_NONE = NodeInfo()


def info_of(node: fx.Node) -> NodeInfo:
    """The record of `node`; an empty forward record where none was set."""
    return cast(NodeInfo, node.meta.get(_KEY, _NONE))


def phases_of(nodes: Iterable[fx.Node]) -> list[Phase]:
    """The phase of each of `nodes`."""
    return [node.meta.get(_KEY, _NONE).phase for node in nodes]


def set_info(node: fx.Node, info: NodeInfo) -> None:
    """Sets the record of `node`."""
    node.meta[_KEY] = info


def copy_info(to: fx.Node, like: fx.Node, **changes: object) -> None:
    """Gives `to` the record of `like`, with the named fields changed."""
    set_info(to, replace(info_of(like), **changes))  # type: ignore[arg-type]


def is_backward(node: fx.Node) -> bool:
    """Whether `node` belongs to the backward half."""
    return info_of(node).phase is Phase.BACKWARD
