"""What the nodes of a lowered graph call: one function per torch_npu kernel, under its name.

A function reaches its operator through `call`, when it is called. It gives the operator the index types and the layout
that it demands, and answers for empty input itself: operators are not asked about zero rows.
"""
from ep_fx.targets.npu.kernels.registry import KERNELS, Call, call, kernel, reached

__all__ = ["KERNELS", "Call", "call", "kernel", "reached"]
