"""Whether a node is zero whatever the inputs are: how the gradient of what was not used looks."""
from __future__ import annotations

from torch import fx

from ep_fx.graph.roles import target_name

_ZEROS = frozenset({"aten::zeros", "aten::zeros_like", "aten::new_zeros"})
_FULLS = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2, "aten::scalar_tensor": 0}
"""Operators that fill with a number, and where that number stands."""
_HANDED_ON = frozenset(
    {
        "aten::_to_copy", "aten::clone", "aten::expand", "aten::neg", "aten::reshape", "aten::t", "aten::transpose",
        "aten::view", "aten::_unsafe_view",
    }
)


def is_zero(node: fx.Node) -> bool:
    """Whether `node` is constant zero, or a view or copy of such a node."""
    while target_name(node) in _HANDED_ON and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    name = target_name(node)
    if name in _FULLS:
        place = _FULLS[name]
        return len(node.args) > place and bool(node.args[place] == 0)
    return name in _ZEROS
