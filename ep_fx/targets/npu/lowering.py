"""One line of the lowering table, and how a node says why it was not lowered."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ep_fx.graph import ParallelGraph

_REASON = "ep_fx_npu_fallback"


@dataclass(frozen=True)
class Lowering:
    """How one kind of node, or of pattern, is emitted for the NPU.

    Args:
        name: short name, unique in the table.
        takes: what of the dialect or of ATen it takes, for people.
        emits: names of the kernels (``ep_fx.targets.npu.kernels``) that it may put there.
        fallback: what runs where a precondition does not hold.
        source: where the semantics of the kernels come from.
        apply: rewrites every such node of a graph in place, forward and backward; where it leaves one as it is, it
            says why through `keep`.
    """

    name: str
    takes: str
    emits: tuple[str, ...]
    fallback: str
    source: str
    apply: Callable[[ParallelGraph], None]


def keep(node: fx.Node, lowering: str, reason: str) -> None:
    """Records that `lowering` left `node` to its fallback, and why."""
    node.meta[_REASON] = f"{lowering}: {reason}"


def kept_reason(node: fx.Node) -> str | None:
    """Why `node` was left to its fallback; None where nothing was recorded."""
    return node.meta.get(_REASON)
