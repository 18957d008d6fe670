"""The lines of the table, by what they rewrite."""
from ep_fx.targets.npu.lowerings.casts import CASTS
from ep_fx.targets.npu.lowerings.dense import DENSE
from ep_fx.targets.npu.lowerings.fused_exchange import fused_exchange
from ep_fx.targets.npu.lowerings.grouped_mm import BIAS, GROUPED_MM
from ep_fx.targets.npu.lowerings.in_place import IN_PLACE
from ep_fx.targets.npu.lowerings.join import JOIN
from ep_fx.targets.npu.lowerings.main_grads import MAIN_GRADS
from ep_fx.targets.npu.lowerings.regroup import REGROUP
from ep_fx.targets.npu.lowerings.routing import ROUTING
from ep_fx.targets.npu.lowerings.swiglu import SWIGLU

__all__ = [
    "BIAS", "CASTS", "DENSE", "GROUPED_MM", "IN_PLACE", "JOIN", "MAIN_GRADS", "REGROUP", "ROUTING", "SWIGLU",
    "fused_exchange",
]
