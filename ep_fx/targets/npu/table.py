"""The lowering table, in the order in which its lines are applied."""
from __future__ import annotations

from ep_fx.targets.npu.lowering import Lowering
from ep_fx.targets.npu.lowerings import BIAS, GROUPED_MM, REGROUP, ROUTING

TABLE: tuple[Lowering, ...] = (ROUTING, GROUPED_MM, BIAS, REGROUP)
