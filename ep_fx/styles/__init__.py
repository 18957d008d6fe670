"""Parallel styles of experts."""
from ep_fx.styles.style import ExpertParallel, ExpertTensorParallel, Style, TensorParallel

__all__ = ["ExpertParallel", "ExpertTensorParallel", "Style", "TensorParallel"]
