"""From an unmodified model to a clean joint graph. Private torch API is used here, in `sharding` and in `ops` only."""

from ep_fx.capture.build import build_graph, placeholder_names
from ep_fx.capture.experts import (
    Experts,
    Stack,
    Stacking,
    find_experts,
    fold,
    register_experts,
    stack_experts,
    top_k_of,
    unfold,
)
from ep_fx.capture.inputs import READINGS, STATIC, Inputs, Key, Sizes
from ep_fx.capture.joint import Trace, outside_modes, trace_joint
from ep_fx.capture.outputs import drop_caches, refuse_caches

__all__ = [
    "READINGS",
    "STATIC",
    "Sizes",
    "Experts",
    "Inputs",
    "Key",
    "Stack",
    "Stacking",
    "Trace",
    "build_graph",
    "drop_caches",
    "find_experts",
    "fold",
    "placeholder_names",
    "outside_modes",
    "refuse_caches",
    "register_experts",
    "stack_experts",
    "top_k_of",
    "trace_joint",
    "unfold",
]
