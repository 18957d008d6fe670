"""Graphviz text: every box and arrow, strings that stay closed."""
from __future__ import annotations

import re

from ep_fx.viz import Picture, build_picture, to_dot
from tests.viz import synthetic

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)


def test_every_box_and_arrow_is_there_once(folded: Picture) -> None:
    dot = to_dot(folded)
    boxes = [int(number) for number in re.findall(r"^    n(\d+) \[", dot, re.M)]
    assert sorted(boxes) == list(range(len(folded.nodes)))
    assert len(re.findall(r"^  n\d+ -> n\d+ \[", dot, re.M)) == len(folded.edges)


def test_brackets_balance_and_strings_are_closed(folded: Picture) -> None:
    for picture in (folded, build_picture(synthetic.hostile())):
        bare = _STRING.sub("", to_dot(picture))
        assert '"' not in bare
        for opening, closing in ("{}", "[]"):
            assert bare.count(opening) == bare.count(closing)


def test_blocks_are_clusters_of_each_half(folded: Picture) -> None:
    dot = to_dot(folded)
    assert 'label="layers.1, forward"' in dot
    assert 'label="layers.1, backward"' in dot


def test_context_arrows_look_different(folded: Picture) -> None:
    assert re.search(r'-> n\d+ \[class="context", color="#d68a00"', to_dot(folded))
