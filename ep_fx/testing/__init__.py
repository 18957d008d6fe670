"""What tests of ep_fx, and of models that use it, need: local ranks, fake meshes, assertions on graphs, a log of what
was communicated. Selectors are in `ep_fx.testing.select`, fixtures in the pytest plugin (docs/testing.md)."""
from ep_fx.graph import parse_graph
from ep_fx.testing.assertions import (
    assert_before,
    assert_collectives,
    assert_count,
    assert_equivalent,
    assert_flows,
    assert_live_range,
    assert_reduced_once,
    collective_lines,
)
from ep_fx.testing.collective_log import CollectiveLog, Event, assert_same_sequence
from ep_fx.testing.fake import FakeMeshes, fake_mesh, fake_world
from ep_fx.testing.golden import Golden, golden_text
from ep_fx.testing.ranks import RankError, RankPool, RankPools, local_mesh, run_ranks, warm_up
from ep_fx.testing.select import Match, Selector, SelectorError
from ep_fx.testing.selector_text import parse_selector

__all__ = [
    "CollectiveLog", "Event", "FakeMeshes", "Golden", "Match", "RankError", "RankPool", "RankPools", "Selector",
    "SelectorError", "assert_before", "assert_collectives", "assert_count", "assert_equivalent", "assert_flows",
    "assert_live_range", "assert_reduced_once", "assert_same_sequence", "collective_lines", "fake_mesh", "fake_world",
    "golden_text", "local_mesh", "parse_graph", "parse_selector", "run_ranks", "warm_up",
]
