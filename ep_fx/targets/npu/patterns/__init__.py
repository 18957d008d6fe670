"""Patterns by example: what a function and its gradients look like in a joint graph, and where a graph has that.

    trace     example(*inputs), autograd.grad of it        -> Pattern, a graph with inputs, outputs and numbers to find
    match     Pattern, joint graph, a node to begin at     -> Match, or the reason why there is none
    replace   Match, nodes that compute the outputs anew   -> the graph without what was matched
"""
from ep_fx.targets.npu.patterns.match import Match, find
from ep_fx.targets.npu.patterns.pattern import Pattern
from ep_fx.targets.npu.patterns.replace import place, replace
from ep_fx.targets.npu.patterns.trace import Example, trace

__all__ = ["Example", "Match", "Pattern", "find", "place", "replace", "trace"]
