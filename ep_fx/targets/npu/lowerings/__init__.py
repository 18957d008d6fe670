"""The lines of the table, by what they rewrite."""
from ep_fx.targets.npu.lowerings.grouped_mm import BIAS, GROUPED_MM
from ep_fx.targets.npu.lowerings.regroup import REGROUP
from ep_fx.targets.npu.lowerings.routing import ROUTING

__all__ = ["BIAS", "GROUPED_MM", "REGROUP", "ROUTING"]
