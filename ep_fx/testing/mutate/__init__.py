"""Breaks valid graphs on purpose and asks whether the verifier notices: the test of the tests.

    base, mutants                  what an operator is; random combinations
    memory .. identity, blind_*    the operators; those of blind_* are by an author who had not seen the rules
    subject, oracle, execute       valid graphs, and what a mutant does on real ranks
    judge                          which faults the rules catch
"""
from ep_fx.testing.mutate.base import Operator, choose, operator, operators

__all__ = ["Operator", "choose", "operator", "operators"]
