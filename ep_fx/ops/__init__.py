"""The dialect: importing this package defines every operator of ``torch.ops.ep_fx``."""
from ep_fx.ops import attention, exchange, grouped_mm, lowered, reduce, routing, tensor_parallel, unshard
from ep_fx.ops.context import DispatchContext, dispatch_context, regroup_indices
from ep_fx.ops.library import NAMESPACE

__all__ = [
    "NAMESPACE", "DispatchContext", "attention", "dispatch_context", "exchange", "grouped_mm", "lowered", "reduce",
    "regroup_indices", "routing", "tensor_parallel", "unshard",
]
