"""Added, removed, moved: the three explain how one list became the other, and no fewer moves would."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from ep_fx.graph.difference import compare

LISTS = st.lists(st.integers(0, 9), unique=True, max_size=7)


@given(LISTS, LISTS)
@settings(max_examples=200, deadline=None)
def test_difference_explains_the_new_list_with_the_fewest_moves(before: list[int], after: list[int]) -> None:
    difference = compare(before, after)
    assert set(difference.added) == set(after) - set(before)
    assert set(difference.removed) == set(before) - set(after)
    stayed = [item for item in after if item in before]
    resting = [item for item in stayed if item not in difference.moved]
    assert resting == [item for item in before if item in resting]
    longest = max(
        len(kept)
        for size in range(len(stayed) + 1)
        for kept in combinations(stayed, size)
        if list(kept) == [item for item in before if item in kept]
    )
    assert len(resting) == longest


def test_a_hundred_thousand_items_in_reverse_take_no_time() -> None:
    items = list(range(100_000))
    assert len(compare(items, items[::-1]).moved) == 99_999
