"""`explain`: what a step does, as tables, and answers to questions about single nodes, all read from the graph."""

from ep_fx.explain.explanation import Explanation, explain
from ep_fx.explain.gather import GatherAnswer
from ep_fx.explain.gradient import GradientAnswer
from ep_fx.explain.lowering import LoweringAnswer
from ep_fx.explain.names import UnknownNameError
from ep_fx.explain.table import Table
from ep_fx.explain.waiters import WaitersAnswer

__all__ = [
    "Explanation", "GatherAnswer", "GradientAnswer", "LoweringAnswer", "Table", "UnknownNameError", "WaitersAnswer",
    "explain",
]
