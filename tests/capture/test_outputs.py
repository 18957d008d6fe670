"""Generation caches: dropped from outputs, refused as arguments."""
from __future__ import annotations

from typing import Any

import pytest
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ep_fx.capture import drop_caches, refuse_caches


@pytest.mark.parametrize(
    "kwargs", [{"use_cache": True}, {"cache": DynamicCache()}, {"past_key_values": ((1, 2),)}], ids=str
)
def test_a_call_that_asks_for_a_cache_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cache"):
        refuse_caches(kwargs)


def test_a_call_that_declines_a_cache_is_accepted() -> None:
    refuse_caches({"use_cache": False, "cache": None, "past_key_values": None})


def test_a_cache_in_the_output_goes_and_the_class_stays() -> None:
    output, dropped = drop_caches(CausalLMOutputWithPast(logits=1.0, past_key_values=DynamicCache()))
    assert type(output) is CausalLMOutputWithPast
    assert dict(output) == {"logits": 1.0}
    assert dropped == ["DynamicCache"]
