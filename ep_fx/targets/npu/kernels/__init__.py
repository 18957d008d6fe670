"""What the nodes of a lowered graph call: one function per torch_npu kernel, under its name.

A function looks `torch.ops.npu` up when it is called, never before. It gives the kernel the index types and the layout
that it demands, and answers for empty input itself: kernels are not asked about zero rows.
"""
from ep_fx.targets.npu.kernels.registry import KERNELS, kernel

__all__ = ["KERNELS", "kernel"]
