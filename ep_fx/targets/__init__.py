"""Lowering of graphs to what runs them, one file per target."""
from ep_fx.targets.eager import Boxed, emit

__all__ = ["Boxed", "emit"]
