"""Assertions on graphs and on transformed modules; each failure shows expected, got, and the nodes around with their
module path and source line. A graph is a `ParallelGraph` or a transformed module; a selector may be given as text."""
from ep_fx.testing.assertions.collectives import assert_collectives, collective_lines
from ep_fx.testing.assertions.counts import assert_count
from ep_fx.testing.assertions.equivalence import assert_equivalent
from ep_fx.testing.assertions.flows import assert_flows
from ep_fx.testing.assertions.live_range import assert_live_range
from ep_fx.testing.assertions.order import assert_before
from ep_fx.testing.assertions.reductions import assert_reduced_once

__all__ = [
    "assert_before", "assert_collectives", "assert_count", "assert_equivalent", "assert_flows", "assert_live_range",
    "assert_reduced_once", "collective_lines",
]
