"""The rewrites, one file each, and the default pipeline."""
from ep_fx.graph import Pass
from ep_fx.passes.dead_code import DeadCode
from ep_fx.passes.expert_parallel import ExpertParallel
from ep_fx.passes.fsdp import Fsdp

__all__ = ["DeadCode", "ExpertParallel", "Fsdp", "default_pipeline"]


def default_pipeline() -> tuple[Pass, ...]:
    """The passes that every transform runs, in order."""
    return (DeadCode(), ExpertParallel(), Fsdp(), DeadCode())
