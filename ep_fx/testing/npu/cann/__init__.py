"""The real torch_npu on a machine without NPU and without CANN, for tests.

`stubs` compiles libraries that stand in for CANN (device memory is host memory, HCCL is shared memory of one host);
`simulate` then puts CPU kernels where torch_npu would launch the device's. All else is torch_npu's own code: schemas,
Meta kernels, autograd formulas, allocator, streams, ProcessGroupHCCL. What stays unproven is what CANN itself does:
the numerics of its kernels, what they refuse, overlap, speed.
"""
