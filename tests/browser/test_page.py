"""The page as people use it: it opens fast and quietly, folds, finds, toggles, explains, steps through the passes."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.conftest import LAYERS
from tests.browser.view import View

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
Open = Callable[..., View]
BOTH = ["8 layers", "61 layers"]


@pytest.mark.parametrize("name", LAYERS)
def test_it_opens_without_network_and_paints_within_three_seconds(open_page: Open, name: str) -> None:
    view = open_page(name)
    paints = view.ask("performance.getEntriesByType('paint').map(e => [e.name, e.startTime])")
    painted = dict(paints)["first-contentful-paint"]
    drawn = view.ask("performance.getEntriesByName('drawn')[0].startTime")
    print(f"{name}: first paint {painted:.0f} ms, picture drawn {drawn:.0f} ms")
    assert max(painted, drawn) < 3000
    assert {"forward \u2193", "backward \u2191", "unshard root"} <= {text.text for text in view.texts()}


@pytest.mark.parametrize("name", BOTH)
def test_groups_fold_and_open(open_page: Open, name: str) -> None:
    view = open_page(name)
    assert "dispatch" in view.boxes()
    view.click_box("layers.0.experts", "frame")
    folded = view.boxes()
    assert "dispatch" not in folded
    assert folded.count("experts") == 2                                 # its forward and its backward half
    view.click_box("experts", "fold")
    assert "dispatch" in view.boxes()
    assert any(title.startswith("layers.1 \u2026") for title in view.boxes())          # the layers that are alike


def test_everything_can_be_opened_and_folded(open_page: Open) -> None:
    view = open_page("8 layers")
    view.page.click("#unfold")
    view.settle()
    assert view.boxes().count("dispatch") == 8
    view.page.click("#fold")
    view.settle()
    assert "layers" in view.boxes()
    assert "layers.0" not in view.boxes()


@pytest.mark.parametrize("name", BOTH)
def test_search_leads_to_a_node_and_opens_its_groups(open_page: Open, name: str) -> None:
    view = open_page(name)
    assert "reshard layers.7" not in view.boxes()
    view.press("/")
    view.page.keyboard.type("reshard layers.7")
    view.settle()
    assert "4 found" in view.page.inner_text("#hit-count")             # the layer and its experts, forward and backward
    view.press("Enter")
    assert "reshard layers.7" in view.boxes()
    assert view.page.inner_text("#details h3") == "reshard layers.7"
    assert "layers.7.router" in view.page.inner_text("#details")        # one of its parameters


@pytest.mark.parametrize("view_name", ["structure", "schedule"])
def test_f_and_b_hide_a_half(open_page: Open, view_name: str) -> None:
    view = open_page("8 layers", f"view={view_name}")
    before = len(view.texts())
    view.press("b")
    without = len(view.texts())
    assert without < before
    assert not view.page.is_checked("[data-option=backward]")
    view.press("f")
    assert len(view.texts()) < without
    view.press("f", "b")
    assert len(view.texts()) == before


def test_kept_values_and_order_are_shown_on_demand(open_page: Open) -> None:
    view = open_page("8 layers")
    blank = view.page.screenshot()
    view.press("s")
    kept = view.page.screenshot()
    view.press("o")
    assert len({blank, kept, view.page.screenshot()}) == 3


def test_a_tooltip_tells_shapes_dtype_source_group_and_bytes(open_page: Open) -> None:
    view = open_page("8 layers", "at=layers.0.experts")
    view.page.mouse.move(*view.place_of("dispatch"))
    view.settle()
    tip = view.page.inner_text("#tip")
    for expected in ("f32[u0, 64]", "synthetic.py:1", "over ep", "B moved", "layers.0.experts", "all_to_all_single"):
        assert expected in tip
    view.page.mouse.move(*view.place_of("unshard layers.0.experts"))
    view.settle()
    assert "layers.0.experts.w1, layers.0.experts.w2" in view.page.inner_text("#tip")
    assert "256.0 KiB moved" in view.page.inner_text("#tip")


def test_a_bar_of_the_schedule_tells_when_and_a_life_its_bytes(open_page: Open) -> None:
    view = open_page("8 layers", "view=schedule&at=layers.0")
    for what, expected in (("d.life && d.life.unit === 'layers.0.experts'", "256.0 KiB"), ("d.bar", "when")):
        x, y = view.ask(
            f"(() => {{ const d = epfx.drawn().find(d => ({what}) && d.x > 200), "
            "r = document.querySelector('#schedule canvas').getBoundingClientRect();"
            "return [d.x + d.w / 2 + r.left, d.y + d.h / 2 + r.top]; })()"
        )
        view.page.mouse.move(x, y)
        view.settle()
        assert expected in view.page.inner_text("#tip")


def test_micro_batches_are_bands(open_page: Open) -> None:
    view = open_page("8 layers", "view=schedule")
    view.page.fill("#batches", "3")
    view.page.press("#batches", "Enter")
    view.settle()
    texts = {text.text for text in view.texts()}
    assert {f"micro-batch {m} \u00b7 {half}" for m in range(3) for half in ("forward", "backward")} <= texts


@pytest.mark.parametrize("name", BOTH)
def test_the_slider_steps_through_the_passes(open_page: Open, name: str) -> None:
    view = open_page(name, "view=passes&step=0")
    records = view.ask("epfx.model.data.passes.records")
    assert "before any pass" in view.page.inner_text("#verdict")
    for step, (label, _, _, added, removed, moved) in enumerate(records, start=1):
        view.press("ArrowRight")
        assert view.page.input_value("#step") == str(step)
        verdict = view.page.inner_text("#verdict")
        assert verdict.startswith(label)
        if added + removed + moved:
            assert f"added {added:,}, removed {removed:,}, moved {moved:,}" in verdict
        counted = view.ask("[...document.querySelectorAll('#by-module td.n.added')]"
                           ".reduce((sum, td) => sum + +td.textContent.replace(/[+,]/g, ''), 0)")
        assert counted == added
    view.page.focus("#step")
    view.press("ArrowLeft")
    assert view.page.input_value("#step") == str(len(records) - 1)


def test_the_text_form_is_one_click_away(open_page: Open) -> None:
    view = open_page("8 layers", "view=text")
    assert "ep_fx.unshard" in view.page.inner_text("#lines")
    assert "unshard" in view.page.inner_text("#summary")


def test_it_stays_smooth_when_all_of_twenty_thousand_nodes_are_open(open_page: Open) -> None:
    """Milliseconds of script for one frame; far more than a quiet machine needs."""
    view = open_page("20,000 nodes", "fold=none")
    frames = view.ask(
        "[0, 40000, 200000].map(y => { const s = epfx.views.structure.surface; s.camera.y = y; s.draw();"
        "const t = performance.now(); for (let i = 0; i < 5; i++) s.draw(); return (performance.now() - t) / 5; })"
    )
    print("frames:", [f"{ms:.1f} ms" for ms in frames])
    assert view.ask("epfx.boxes().length") > 8000
    assert max(frames) < 100


_PLACES = """(() => {
  const unit = b => b.type === 'leaf' && b.lane === 0 && b.item.kind !== 10;
  const main = b => b.type === 'leaf' && b.lane === 1;
  const wrong = [], boxes = epfx.boxes();
  for (const u of boxes.filter(unit)) for (const m of boxes.filter(main)) {
    if (u.backward !== m.backward || [10, 11].includes(m.item.kind)) continue;
    const down = (m.item.pos < u.item.pos) !== u.backward;
    if (down ? m.y > u.y : m.y < u.y) wrong.push([u.title, m.title, u.item.pos, m.item.pos]);
  }
  return [boxes.filter(unit).length, wrong];
})()"""


def test_gathers_frees_reductions_and_waits_stand_where_they_are_in_the_graph(open_page: Open) -> None:
    view = open_page("8 layers")
    view.page.click("#unfold")
    view.settle()
    count, wrong = view.ask(_PLACES)
    assert count == 2 * 17 + 2 * 17 + 17 + 16                 # gathers, frees; reductions, waits of all but one
    assert wrong == []


@pytest.mark.parametrize("button", ["#unfold", "#fold", ""])
def test_a_band_goes_from_a_gather_to_its_free(open_page: Open, button: str) -> None:
    view = open_page("8 layers")
    if button:
        view.page.click(button)
        view.settle()
    root = {life["backward"]: life for life in view.ask("epfx.lives()") if life["path"] == ""}
    last = "epfx.boxes().filter(b => b.title.startsWith('layers')).map(b => b.y + b.h)"
    frames = "epfx.frames().filter(f => f.item.path === 'layers').map(f => f.y + f.h)"
    below_layers = max(view.ask(frames) or view.ask(last))
    assert root[False]["top"] < 100                                       # whole from the embedding to the head
    assert root[False]["bottom"] > below_layers
    assert root[True]["top"] > below_layers                               # freed again before the last layer's backward


def test_the_waits_at_the_end_share_a_box(open_page: Open) -> None:
    view = open_page("8 layers")
    view.click_box("wait: reduce \u00d7 16", "fold")
    assert "wait: reduce layers.7.experts" in view.boxes()


@pytest.mark.parametrize("name", ["structure", "schedule", "passes", "text"])
def test_the_name_of_a_view_is_an_address(open_page: Open, name: str) -> None:
    view = open_page("8 layers", name)
    assert view.ask("document.querySelector('#tabs button.on').dataset.view") == name
    assert view.ask("location.hash") == f"#view={name}"
