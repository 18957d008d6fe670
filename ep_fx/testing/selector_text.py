"""Selectors written as text: ``parse_selector(text)``, and ``str(selector)`` prints what parses back to an equal one.

    selector = all ("|" all)*        all = one ("&" one)*        one = "!" one | "(" selector ")" | atom
    atom     = word ["[" field "=" value ("," field "=" value)* "]"]        value = plain | "quoted"
"""
from __future__ import annotations

import re

from ep_fx.testing.select import Atom, Not, Selector, SelectorError

_TOKEN = re.compile(r'\s*(?:(?P<word>[\w.*?/:-]+)|"(?P<quoted>[^"]*)"|(?P<sign>[][()&|!=,]))')


def parse_selector(text: str) -> Selector:
    """The selector that `text` describes.

    Raises:
        SelectorError: an unknown word or field, or what stands where it does not belong.
    """
    reader = _Reader(text)
    found = reader.some()
    reader.expect("")
    return found


def as_selector(value: Selector | str) -> Selector:
    """`value`, parsed where it is text."""
    return parse_selector(value) if isinstance(value, str) else value


class _Reader:
    """Tokens of one text from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def some(self) -> Selector:
        """One or several, joined by ``|``."""
        found = self._all()
        while self._take("|"):
            found = found | self._all()
        return found

    def expect(self, sign: str) -> None:
        """Takes `sign`, or the end of the text for an empty one."""
        if (sign and not self._take(sign)) or (not sign and self._text[self._at :].strip()):
            raise self._error(f"expected {sign!r}" if sign else "expected '&', '|' or the end")

    def _all(self) -> Selector:
        found = self._one()
        while self._take("&"):
            found = found & self._one()
        return found

    def _one(self) -> Selector:
        if self._take("!"):
            return Not(self._one())
        if self._take("("):
            inner = self.some()
            self.expect(")")
            return inner
        return Atom(self._word("a word"), self._fields())

    def _fields(self) -> tuple[tuple[str, str], ...]:
        if not self._take("["):
            return ()
        fields = [self._field()]
        while self._take(","):
            fields.append(self._field())
        self.expect("]")
        return tuple(fields)

    def _field(self) -> tuple[str, str]:
        name = self._word("a field")
        self.expect("=")
        return name, self._word("a value", quoted=True)

    def _word(self, what: str, quoted: bool = False) -> str:
        token = _TOKEN.match(self._text, self._at)
        kind = None if token is None else token.lastgroup
        if token is None or kind is None or kind not in (("word", "quoted") if quoted else ("word",)):
            raise self._error(f"expected {what}")
        self._at = token.end()
        return str(token[kind])

    def _take(self, sign: str) -> bool:
        token = _TOKEN.match(self._text, self._at)
        if token is None or token["sign"] != sign:
            return False
        self._at = token.end()
        return True

    def _error(self, problem: str) -> SelectorError:
        rest = self._text[self._at :].strip()
        return SelectorError(f"{problem} at {repr(rest) if rest else 'the end'} in selector {self._text!r}")
