"""The lowering table, in the order in which its lines are applied."""
from __future__ import annotations

from ep_fx.targets.npu.lowering import Lowering
from ep_fx.targets.npu.lowerings import BIAS, DENSE, GROUPED_MM, IN_PLACE, JOIN, REGROUP, ROUTING, SWIGLU

TABLE: tuple[Lowering, ...] = (*DENSE, IN_PLACE, JOIN, SWIGLU, ROUTING, GROUPED_MM, BIAS, REGROUP)
"""Those that look for what a capture shows come before those that change it: torch's own norm writes in place."""
