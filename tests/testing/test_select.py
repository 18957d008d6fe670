"""Selectors: composed, printed and parsed alike, and errors that list what there is."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_fx.graph import ParallelGraph
from ep_fx.testing.graph_index import FIELDS, WORDS
from ep_fx.testing.select import (
    Atom,
    Selector,
    SelectorError,
    collective,
    combine,
    dispatch,
    module,
    phase,
    reduce_grad,
    role,
    unshard,
)
from ep_fx.testing.selector_text import parse_selector
from ep_fx.testing.synthetic import parallel_step

VALUES = st.text("abl.019*?-_, &]\\", min_size=1, max_size=8)
ATOMS = st.builds(
    lambda word, fields: Atom(word, tuple(fields.items())),
    st.sampled_from(WORDS),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
SELECTORS = st.recursive(
    ATOMS, lambda inner: st.builds(lambda a, b: a & b, inner, inner) | st.builds(lambda a, b: a | b, inner, inner)
    | st.builds(lambda a: ~a, inner), max_leaves=6,
)


@pytest.fixture(scope="module")
def graph() -> ParallelGraph:
    return parallel_step(2)


def names(selector: Selector, graph: ParallelGraph) -> list[str]:
    return [match.nodes[0].name for match in selector.find(graph)]


@given(SELECTORS)
def test_what_is_printed_parses_back(selector: Selector) -> None:
    assert parse_selector(str(selector)) == selector


@pytest.mark.parametrize(
    ("selector", "text", "count"),
    [
        (unshard("layers.0.experts"), "unshard[unit=layers.0.experts]", 2),
        (unshard("layers.*", phase="forward"), "unshard[unit=layers.*,phase=forward]", 4),
        (dispatch("layers.0"), "dispatch[layer=layers.0]", 1),
        (dispatch() | combine(), "dispatch | combine", 4),
        (dispatch() & phase("forward"), "dispatch & node[phase=forward]", 2),
        (dispatch() & role("all_to_all"), "dispatch & all_to_all", 4),
        ((dispatch() | combine()) & phase("forward"), "(dispatch | combine) & node[phase=forward]", 4),
        (~phase("forward") & collective(), "!node[phase=forward] & collective", 14),
        (collective("fsdp,ep") & ~reduce_grad(), 'collective[over="fsdp,ep"] & !reduce_grad', 6),
        (role("all_to_all", layer="layers.1"), "all_to_all[layer=layers.1]", 5),
        (role("node", parameter="layers.0.experts.w1") & role("reduce_grad"), None, 1),
        (module("layers.0*") & role("node", op="aten.mm"), None, 15),
    ],
    ids=str,
)
def test_what_is_selected(graph: ParallelGraph, selector: Selector, text: str | None, count: int) -> None:
    assert text in (None, str(selector))
    assert len(selector.find(graph)) == count


def test_a_half_of_an_exchange_is_one_match_from_its_first_to_its_last_node(graph: ParallelGraph) -> None:
    (match,) = dispatch("layers.1").find(graph)
    targets = [str(node.target) for node in match.nodes]
    assert "_c10d_functional.all_to_all_single" in targets[0]
    assert "ep_fx.regroup" in targets[-1]
    positions = graph.positions()
    assert (match.first, match.last) == (positions[match.nodes[0]], positions[match.nodes[-1]])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("unshrd", "no word 'unshrd'; did you mean 'unshard'?"),
        ("unshard[unti=x]", "no field 'unti'; did you mean 'unit'?"),
        ("unshard[unit=layer.0]", "no unit 'layer.0' in this graph; did you mean 'layers.0'? there are: layers.0, "),
        ("dispatch[layer=head.*]", "no layer 'head.*' in this graph"),
        ("combine[phase=backwards]", "no phase 'backwards' in this graph; did you mean 'backward'?"),
        ("unshard[", "expected a field at the end in selector 'unshard['"),
        ("unshard[unit]", "expected '=' at ']'"),
        ("unshard dispatch", "expected '&', '|' or the end at 'dispatch'"),
        ("(unshard", "expected ')' at the end"),
        ("", "expected a word at the end"),
    ],
)
def test_errors_say_what_there_is(graph: ParallelGraph, text: str, said: str) -> None:
    with pytest.raises(SelectorError) as error:
        parse_selector(text).find(graph)
    assert said in str(error.value)
