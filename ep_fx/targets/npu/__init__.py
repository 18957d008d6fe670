"""The Ascend NPU through torch_npu: a lowering table, its kernels, and what they demand. Imports no torch_npu."""
from ep_fx.ops.library import offer_kernels
from ep_fx.targets.npu import eager
from ep_fx.targets.npu.coverage import FallbackError, coverage, require_kernels
from ep_fx.targets.npu.lower import lower
from ep_fx.targets.npu.lowering import Lowering
from ep_fx.targets.npu.rule import check_target, run_time_conditions
from ep_fx.targets.npu.table import TABLE

offer_kernels("npu", eager.kernels)

__all__ = [
    "TABLE", "FallbackError", "Lowering", "check_target", "coverage", "lower", "require_kernels",
    "run_time_conditions",
]
