"""What the nodes of a lowered graph call: one function per torch_npu kernel, under its name.

A function reaches its operator through `call`, when it is called. It gives the operator the index types and the layout
that it demands, and answers for empty input itself: operators are not asked about zero rows. Beside them stand
functions made of operators of ATen alone.
"""
from ep_fx.targets.npu.kernels import activation, attention, context, exchange, matmul, norm, rotary, routing
from ep_fx.targets.npu.kernels.registry import COMPOSITIONS, KERNELS, Call, call, composition, kernel, reached

__all__ = [
    "COMPOSITIONS", "KERNELS", "Call", "activation", "attention", "call", "composition", "context", "exchange",
    "kernel", "matmul", "norm", "reached", "rotary", "routing",
]
