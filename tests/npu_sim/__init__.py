"""Lane (b) and (c) of the NPU target: the real torch_npu on stand-ins for CANN; ``make test-npu-sim``."""
