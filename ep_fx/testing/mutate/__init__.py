"""Breaks valid graphs on purpose and asks whether the verifier notices: the test of the tests."""
from ep_fx.testing.mutate.base import Operator, choose, operator, operators

__all__ = ["Operator", "choose", "operator", "operators"]
