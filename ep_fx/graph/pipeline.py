"""Pipelines as text: ``"expert-parallel,fsdp{reshard=early},dead-code"``, printed and parsed back.

    pipeline   pass , pass , ...          pass   name   or   name{option=value, ...}
    value      a word, a number, or "a text in double quotes"

An option that has its default is not printed. Blanks between the parts do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ep_fx.graph.options import Word, accepted, hints, read, required
from ep_fx.graph.passes import Pass

_TOKEN = re.compile(r'\s*(?:(?P<word>[\w./+-]+)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<sign>[{}=,]))')


def print_pipeline(passes: Sequence[Pass]) -> str:
    """The text of `passes`.

    Raises:
        TypeError: an option that has no text form is set.
    """
    return ",".join(str(step) for step in passes)


def parse_pipeline(text: str, known: Mapping[str, type[Pass]]) -> tuple[Pass, ...]:
    """The passes that `text` names.

    Args:
        text: a pipeline; empty: no pass.
        known: class of each pass that may be named.

    Raises:
        ValueError: an unknown pass (the known ones are listed), an unknown option (those of the pass are listed), a
            value that the option does not accept, or a text of another form.
    """
    parser = _Parser(text, known)
    passes: list[Pass] = []
    while not parser.at_end():
        if passes:
            parser.sign(",")
        passes.append(parser.one_pass())
    return tuple(passes)


class _Parser:
    """Reads one pipeline from left to right."""

    def __init__(self, text: str, known: Mapping[str, type[Pass]]) -> None:
        self._text, self._known, self._at = text, known, 0

    def at_end(self) -> bool:
        return not self._text[self._at :].strip()

    def _next(self, wanted: str) -> re.Match[str]:
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise ValueError(f"pipeline {self._text!r}: expected {wanted} at {self._text[self._at :]!r}")
        return match

    def sign(self, sign: str) -> None:
        match = self._next(repr(sign))
        if match["sign"] != sign:
            raise ValueError(f"pipeline {self._text!r}: expected {sign!r}, got {match[0].strip()!r}")
        self._at = match.end()

    def _is(self, sign: str) -> bool:
        match = _TOKEN.match(self._text, self._at)
        return match is not None and match["sign"] == sign

    def _word(self, wanted: str) -> Word:
        match = self._next(wanted)
        if match["sign"]:
            raise ValueError(f"pipeline {self._text!r}: expected {wanted}, got {match['sign']!r}")
        self._at = match.end()
        if match["text"] is None:
            return Word(match["word"])
        return Word(json.loads(match["text"]), quoted=True)

    def one_pass(self) -> Pass:
        name = self._word("the name of a pass").text
        cls = self._known.get(name)
        if cls is None:
            known = ", ".join(sorted(self._known))
            raise ValueError(f"pipeline {self._text!r}: no pass {name!r}; known passes: {known}")
        options = self._options(cls) if self._is("{") else {}
        if missing := [option for option in required(cls) if option not in options]:
            raise ValueError(f"pass {name!r} needs option {missing[0]!r}: {accepted(hints(cls)[missing[0]])}")
        return cls(**options)

    def _options(self, cls: type[Pass]) -> dict[str, Any]:
        options, annotations = dict[str, Any](), hints(cls)
        self.sign("{")
        while not self._is("}"):
            if options:
                self.sign(",")
            name = self._word(f"an option of {cls.name!r}").text
            self.sign("=")
            word = self._word(f"a value of {name!r}")
            if name not in annotations:
                known = "; ".join(f"{key}: {accepted(hint)}" for key, hint in annotations.items())
                raise ValueError(f"pass {cls.name!r} has no option {name!r}; its options: {known or 'none'}")
            if name in options:
                raise ValueError(f"pass {cls.name!r}: option {name!r} is given twice")
            try:
                options[name] = read(annotations[name], word)
            except ValueError as error:
                raise ValueError(f"pass {cls.name!r}, option {name!r}: {error}") from None
        self.sign("}")
        return options
