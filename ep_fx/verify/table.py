"""The rule table: one line a rule, in the order in which they run and are printed."""
from __future__ import annotations

from ep_fx.verify.computation import computes
from ep_fx.verify.effects import effects
from ep_fx.verify.ep_order import ep_order
from ep_fx.verify.gradients import divisor, reduce_once
from ep_fx.verify.live import live, once, saved
from ep_fx.verify.order import order
from ep_fx.verify.pair import pair
from ep_fx.verify.partial import partial
from ep_fx.verify.peak import peak
from ep_fx.verify.rule import Rule
from ep_fx.verify.state import no_state
from ep_fx.verify.types import types
from ep_fx.verify.waits import wait

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        order, types, pair, no_state, live, once, ep_order, reduce_once, divisor, partial, saved, peak, wait, effects,
        computes,
    )
}
