"""The lowering table, in the order in which its lines are applied."""
from __future__ import annotations

from ep_fx.targets.npu.lowering import Lowering

TABLE: tuple[Lowering, ...] = ()
