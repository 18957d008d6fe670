"""ep_fx: a torch.fx graph compiler for Mixture-of-Experts training with expert parallelism and FSDP."""
try:
    import torch  # noqa: F401  (first, so that its one error that concerns us is told from ours)
except RuntimeError as error:
    raise ImportError(
        f"import torch failed: {error} ({error.__cause__}). Where torch_npu is installed and CANN is not found: with "
        "CANN, source its set_env.sh before Python starts; without an NPU, set TORCH_DEVICE_BACKEND_AUTOLOAD=0, then "
        "`ep-fx doctor` says what this machine has"
    ) from None

from ep_fx import nn, ops  # ops registers the dialect
from ep_fx.api import transform
from ep_fx.capture import register_experts
from ep_fx.check import CheckReport, check
from ep_fx.config import NpuOptions
from ep_fx.explain import explain
from ep_fx.ops import DispatchContext
from ep_fx.ops.moe import moe
from ep_fx.runtime import EPModule
from ep_fx.styles import ExpertParallel, ExpertTensorParallel, TensorParallel

__all__ = [
    "CheckReport", "DispatchContext", "EPModule", "ExpertParallel", "ExpertTensorParallel", "NpuOptions",
    "TensorParallel", "check", "explain", "moe", "nn", "ops", "register_experts", "transform",
]
