"""One open page, as a reader uses it: keys, pointer, texts in sight."""
from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

_TEXTS = """() => {
  const box = element => element.getBoundingClientRect();
  const found = epfx.labels().map(l => {
    const r = box(document.querySelector('.view:not([hidden]) canvas'));
    return [l.text, l.x + r.left, l.y + r.top, l.w, l.h];
  });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, owner = node.parentElement, range = document.createRange();
    if (!node.textContent.trim() || !owner.checkVisibility()) continue;
    if (owner.closest('script, style, #tip, #details, #hits')) continue;       // what may lie above others
    range.selectNodeContents(node);
    const r = box(range), cell = owner.closest('td, th'), table = owner.closest('table');
    const frame = owner.closest('#changes > div, #stops button, .about, main, footer, header, .bar');
    const clip = box(frame || document.body);
    const right = Math.min(r.right, clip.right, cell ? box(cell).right : Infinity);
    const top = Math.max(r.top, clip.top, table && !owner.closest('th') ? box(table.tHead).bottom : 0);
    const bottom = Math.min(r.bottom, clip.bottom, innerHeight);
    if (right - r.left > 1 && bottom - top > 4)
      found.push([node.textContent.trim(), r.left, top, right - r.left, bottom - top]);
  }
  return found;
}"""
_PLACE = """([title, kind]) => {
  const name = b => b.title || b.item.path || b.item.name;
  const all = kind === 'frame' ? epfx.frames() : epfx.boxes().filter(b => kind === 'box' || b.type === kind);
  const box = all.find(b => name(b) === title), r = document.querySelector('#structure canvas').getBoundingClientRect();
  const [x, y] = epfx.screen(kind === 'frame' ? {...box, w: 60} : box);
  return [x + r.left, y + r.top];
}"""
_FRAME = """() => new Promise(
  done => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))))"""


class Text(NamedTuple):
    """A text in sight and its box, in pixels."""

    text: str
    x: float
    y: float
    w: float
    h: float

    def meets(self, other: Text) -> bool:
        """Whether the two boxes share more than a rim of a pixel."""
        across = min(self.x + self.w, other.x + other.w) - max(self.x, other.x)
        return across > 1 and min(self.y + self.h, other.y + other.h) - max(self.y, other.y) > 1


class View:
    """A page at 1600 x 1000.

    Args:
        page: Playwright's page.
        path: the file.
        state: what stands behind ``#`` in its address.
        screenshots: folder of the test's artefacts.
    """

    def __init__(self, page: Any, path: Path, state: str, screenshots: Path) -> None:
        self.page, self._shots = page, screenshots
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(f"{path.as_uri()}#{state}")
        page.wait_for_function("performance.getEntriesByName('drawn').length > 0")
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for is drawn."""
        self.page.evaluate(_FRAME)

    def ask(self, script: str) -> Any:
        """The value of a script."""
        return self.page.evaluate(script)

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other."""
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def click_box(self, title: str, kind: str = "box") -> None:
        """Clicks the structure's box (``fold``: a folded one; ``frame``: an open group's head) called `title`."""
        self.page.mouse.click(*self.place_of(title, kind))
        self.settle()

    def place_of(self, title: str, kind: str = "box") -> tuple[float, float]:
        """The middle of that box on the screen."""
        at = self.page.evaluate(_PLACE, [title, kind])
        return at[0], at[1]

    def boxes(self) -> list[str]:
        """Titles of all boxes of the structure."""
        found: list[str] = self.ask("epfx.boxes().map(b => b.title)")
        return found

    def texts(self) -> list[Text]:
        """Every text in sight, on the canvas and around it."""
        return [Text(*text) for text in self.page.evaluate(_TEXTS)]

    def keep(self, name: str) -> None:
        """Keeps a screenshot."""
        self._shots.mkdir(parents=True, exist_ok=True)
        self.page.mouse.move(2, 2)
        self.settle()
        self.page.screenshot(path=self._shots / f"{name}.png")
