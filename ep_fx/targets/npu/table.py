"""The lowering table, in the order in which its lines are applied."""
from __future__ import annotations

from ep_fx.config import NpuOptions
from ep_fx.targets.npu.lowering import Lowering
from ep_fx.targets.npu.lowerings import (
    BIAS,
    CASTS,
    DENSE,
    GROUPED_MM,
    IN_PLACE,
    JOIN,
    MAIN_GRADS,
    REGROUP,
    ROUTING,
    SWIGLU,
    fused_exchange,
)

TABLE: tuple[Lowering, ...] = (*DENSE, IN_PLACE, CASTS, JOIN, SWIGLU, ROUTING, GROUPED_MM, BIAS, REGROUP)
"""Those that look for what a capture shows come before those that change it: torch's own norm writes in place."""


def optional(options: NpuOptions) -> tuple[Lowering, ...]:
    """What `options` ask for beyond the table, applied behind it."""
    fused = (fused_exchange(options.soc),) if options.fused_exchange else ()
    return (*fused, MAIN_GRADS) if options.main_grads_fp32 else fused
