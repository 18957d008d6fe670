"""What a graph costs: memory of gathered parameters."""
from ep_fx.cost.liveness import Peak, gathered_bytes, live_unsharded_bytes, peak, peaks

__all__ = ["Peak", "gathered_bytes", "live_unsharded_bytes", "peak", "peaks"]
