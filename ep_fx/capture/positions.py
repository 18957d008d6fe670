"""Lets a model of transformers see, under a trace, that positions which it counted itself hold no packed sequences.

    eager    positions 0, 1, 2, ... -> no mask, attention with is_causal
    traced   may not read values -> a mask [B, 1, S, S] of packed sequences, in case there are any

Where the positions are an ``arange`` by one and a constant, whatever their values, the answer is the same for every
call: "not packed". Positions from anywhere else are left to transformers. Nothing on the model or its config changes.
Private API used here: transformers' ``masking_utils.find_packed_sequence_indices``, torch's proxies of traced tensors.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

aten = torch.ops.aten
_SHIFTS = (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
_SAME_VALUES = (
    aten.unsqueeze.default, aten.expand.default, aten.alias.default, aten.detach.default, aten._to_copy.default,
    aten.clone.default,
)
_FUNCTION = "find_packed_sequence_indices"


@contextmanager
def counted_positions() -> Iterator[None]:
    """Until the end, positions that count by one are known to hold no packed sequences."""
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, _FUNCTION, None)
    if original is None:
        yield
        return

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        node = _node_of(position_ids)
        return None if node is not None and _counts_by_one(node) else original(position_ids)

    setattr(masking, _FUNCTION, find)
    try:
        yield
    finally:
        setattr(masking, _FUNCTION, original)


def _node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that the running trace has for `tensor`; None outside a trace, so that other threads see no change."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _counts_by_one(node: fx.Node) -> bool:
    """Whether `node` is an arange by one, shifted by constants and repeated along new dimensions before it."""
    while node.target in (*_SAME_VALUES, *_SHIFTS):
        if node.target in _SHIFTS and isinstance(node.args[1], fx.Node):
            return False
        if node.target is aten.unsqueeze.default and node.args[1] not in (0, -2):
            return False
        node = node.all_input_nodes[0]
    if node.target is aten.arange.start_step:
        return len(node.args) < 3 or bool(node.args[2] == 1)
    return node.target in (aten.arange.default, aten.arange.start)
