"""The lowering table, in the order in which its lines are applied."""
from __future__ import annotations

from ep_fx.targets.npu.lowering import Lowering
from ep_fx.targets.npu.lowerings import BIAS, GROUPED_MM, IN_PLACE, JOIN, REGROUP, ROUTING, SWIGLU

TABLE: tuple[Lowering, ...] = (IN_PLACE, JOIN, SWIGLU, ROUTING, GROUPED_MM, BIAS, REGROUP)
