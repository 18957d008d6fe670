"""What a graph costs: memory of gathered parameters, time on a nominal machine."""
from ep_fx.cost.liveness import Life, Peak, gathered_bytes, live_unsharded_bytes, lives, peak, peaks

__all__ = ["Life", "Peak", "gathered_bytes", "live_unsharded_bytes", "lives", "peak", "peaks"]
