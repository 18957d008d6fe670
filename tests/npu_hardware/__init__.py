"""Lane (d) of the NPU target: real NPUs, two of them; ``make test-npu``. The only judge of CANN's kernels."""
