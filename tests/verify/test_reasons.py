"""docs/verification.md tells of every rule, and of no other."""

from ep_fx.verify import RULES
from ep_fx.verify.reasons import WHY


def test_every_rule_has_a_reason() -> None:
    assert set(WHY) == set(RULES)
