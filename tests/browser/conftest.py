"""A headless Chromium on pages opened from files, with the network off; every console message and request is kept.

Pages are written once; screenshots stay in build/screenshots. Without Playwright or a Chromium the tests are skipped,
and say why.
"""
from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_fx.graph import PassManager
from ep_fx.passes import default_pipeline
from ep_fx.testing.synthetic import layers_for, logical_step
from ep_fx.verify import verify
from ep_fx.viz import visualize
from tests.browser.view import View

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LAYERS = {"8 layers": 8, "61 layers": 61, "20,000 nodes": layers_for(20_000) + 1}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: run `make test-browser`")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium: none of {', '.join(BROWSERS)} is on the path (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a model, by its name in `LAYERS`."""
    folder = tmp_path_factory.mktemp("pages")

    def write(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            small = LAYERS[name] < 10
            manager = PassManager(default_pipeline(), (lambda g: verify(g).raise_if_broken()) if small else None)
            graph = manager.run(logical_step(LAYERS[name]))
            visualize(graph, path, records=manager.records, history=manager.history)
        return path

    return write


@pytest.fixture
def open_page(browser: Any, page_of: Callable[[str], Path]) -> Iterator[Callable[..., View]]:
    """Opens a page at a state, as its address gives it; fails the test where the page complained or asked for more."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000}, offline=True)
    views: list[View] = []

    def opened(name: str, state: str = "") -> View:
        view = View(context.new_page(), page_of(name), state, SCREENSHOTS)
        views.append(view)
        return view

    yield opened
    complaints = [text for view in views for text in view.complaints]
    requests = [url for view in views for url in view.requests if not url.startswith("file:")]
    context.close()
    assert complaints == []
    assert requests == []
