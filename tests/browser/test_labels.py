"""No two texts meet, in any view, folded, open, near and far; each sight is kept as a screenshot."""
from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from tests.browser.view import View

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
Open = Callable[..., View]
ALL = ["8 layers", "61 layers"]
STATES = {
    "structure": "",
    "structure-folded": "fold=all",
    "structure-layers": "fold=all&open=layers",
    "structure-experts": "at=layers.0.experts",
    "structure-all-open": "fold=none&at=layers.1",
    "schedule": "view=schedule",
    "schedule-layer": "view=schedule&at=layers.3",
    "schedule-order": "view=schedule&axis=order",
    "schedule-batches": "view=schedule&batches=2",
    "passes-captured": "view=passes&step=0",
    "passes-expert-parallel": "view=passes&step=2",
    "passes-fsdp": "view=passes&step=3",
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("state", STATES)
def test_no_two_labels_meet(open_page: Open, name: str, state: str) -> None:
    view = open_page(name, STATES[state])
    view.keep(f"{name.split()[0]}-{state}")
    texts = view.texts()
    assert len(texts) > 30
    assert [(a, b) for a, b in combinations(texts, 2) if a.meets(b)] == []
    legend = {"dispatch: rows to experts", "unshard: gather parameters", "context of a dispatch"}
    assert legend <= {text.text for text in texts}


@pytest.mark.parametrize("zoom", [0.4, 0.7, 1.3, 2.5])
@pytest.mark.parametrize("state", ["structure-all-open", "schedule"])
def test_no_two_labels_meet_at_any_zoom(open_page: Open, state: str, zoom: float) -> None:
    view = open_page("8 layers", STATES[state])
    host = state.split("-")[0]
    view.ask(f"epfx.views.{host}.surface.zoom({zoom}, 700, 300)")
    view.settle()
    texts = view.texts()
    assert [(a, b) for a, b in combinations(texts, 2) if a.meets(b)] == []
    assert min(text.h for text in texts) > 6


def test_two_texts_that_meet_are_noticed(open_page: Open) -> None:
    view = open_page("8 layers")
    view.ask(
        "(() => { const s = document.createElement('span'); s.textContent = 'in the way';"
        "s.style = 'position: fixed; left: 20px; top: 14px'; document.querySelector('header').append(s); })()"
    )
    texts = view.texts()
    assert ("ep_fx graph", "in the way") in {(a.text, b.text) for a, b in combinations(texts, 2) if a.meets(b)}
