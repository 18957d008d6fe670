"""What tests of ep_fx, and of models that use it, need: local ranks and a log of what was communicated."""
from ep_fx.testing.collective_log import CollectiveLog, Event, assert_same_sequence
from ep_fx.testing.ranks import RankError, RankPool, RankPools, local_mesh, run_ranks, warm_up

__all__ = [
    "CollectiveLog", "Event", "RankError", "RankPool", "RankPools", "assert_same_sequence", "local_mesh", "run_ranks",
    "warm_up",
]
