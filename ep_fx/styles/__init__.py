"""Parallel styles of experts."""
from ep_fx.styles.apply import applied_style
from ep_fx.styles.exchange import combine, dispatch
from ep_fx.styles.style import ExpertParallel, ExpertTensorParallel, Style, TensorParallel

__all__ = [
    "ExpertParallel", "ExpertTensorParallel", "Style", "TensorParallel", "applied_style", "combine", "dispatch",
]
