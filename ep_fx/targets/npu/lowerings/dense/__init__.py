"""Lowering of what surrounds the experts: norms, rotary embeddings, attention."""
from ep_fx.targets.npu.lowerings.dense.attention import ATTENTION
from ep_fx.targets.npu.lowerings.dense.norm import RMS_NORM
from ep_fx.targets.npu.lowerings.dense.rotary import ROTARY

DENSE = (ATTENTION, RMS_NORM, ROTARY)

__all__ = ["DENSE"]
