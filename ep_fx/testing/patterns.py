"""Patterns for a text, line by line, so that a test says what it is about and nothing else.

    CHECK: unshard([%p3, %p4]        the next line that holds this
    CHECK-NEXT: unshard_wait         the line right after it
    CHECK-NOT: aten.add              no line from there to the next match, or to the end
    CHECK-COUNT-2: reduce_grad       that many of the next lines that hold this, one by one

``{{regex}}`` is a regular expression, ``[[x:regex]]`` names what one finds, ``[[x]]`` is that again. Runs of blanks
are one blank. Empty lines, and those that begin with ``#``, are for readers.
"""
from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_DIRECTIVE = re.compile(r"\s*CHECK(?:-(NEXT|NOT|COUNT-(\d+)))?:\s*(.*?)\s*$")
_HOLE = re.compile(r"\{\{(.+?)\}\}|\[\[(\w+)(?::(.+?))?\]\]")


@dataclass(frozen=True)
class _Check:
    """One directive: its line in the pattern, kind (empty: plain), how often, and what to find."""

    line: int
    kind: str
    count: int
    text: str


def has_directives(text: str) -> bool:
    """Whether `text` is a list of patterns."""
    return any(_DIRECTIVE.match(line) for line in text.splitlines())


def check_patterns(text: str, patterns: str, name: str = "patterns") -> None:
    """`text` has what `patterns` ask for, in this order.

    Args:
        name: of the patterns, for messages.

    Raises:
        AssertionError: a line that is missing, or one that should not be there; what comes near is shown.
        ValueError: a line of `patterns` is no directive.
    """
    __tracebackhide__ = True
    lines = [" ".join(line.split()) for line in text.splitlines()]
    at, known = 0, dict[str, str]()
    forbidden: list[_Check] = []
    for check in _checks(patterns, name):
        if check.kind == "NOT":
            forbidden.append(check)
            continue
        for _ in range(check.count):
            reach = range(at, min(at + 1, len(lines)) if check.kind == "NEXT" else len(lines))
            place = next((i for i in reach if _fits(check, lines[i], known)), None)
            if place is None:
                raise AssertionError(_missing(check, lines, at, name))
            _refuse(forbidden, lines, range(at, place), known, name)
            forbidden, at = [], place + 1
    _refuse(forbidden, lines, range(at, len(lines)), known, name)


def _checks(patterns: str, name: str) -> Iterator[_Check]:
    for number, line in enumerate(patterns.splitlines(), 1):
        found = _DIRECTIVE.match(line)
        if found is not None:
            kind, count, text = found[1] or "", int(found[2] or 1), " ".join(found[3].split())
            yield _Check(number, kind.split("-")[0], count, text)
        elif line.strip() and not line.lstrip().startswith("#"):
            kinds = "CHECK, CHECK-NEXT, CHECK-NOT, CHECK-COUNT-n or #"
            raise ValueError(f"{name}:{number}: expected {kinds}, got {line!r}")


def _fits(check: _Check, line: str, known: dict[str, str]) -> bool:
    """Whether `line` holds what `check` asks for; enters what it names in `known`."""
    parts, at, named = [], 0, set[str]()
    for hole in _HOLE.finditer(check.text):
        parts.append(re.escape(check.text[at : hole.start()]))
        regex, name, rule = hole.groups()
        if regex is not None:
            parts.append(f"(?:{regex})")
        elif rule is not None:
            parts.append(f"(?P<{name}>{rule})")
            named.add(name)
        elif name in named:
            parts.append(f"(?P={name})")
        elif name in known:
            parts.append(re.escape(known[name]))
        else:
            raise ValueError(f"[[{name}]] in {check.text!r} is not named yet; name it with [[{name}:regex]]")
        at = hole.end()
    found = re.search("".join([*parts, re.escape(check.text[at:])]), line)
    known.update(found.groupdict() if found else {})
    return found is not None


def _refuse(
    forbidden: Sequence[_Check], lines: Sequence[str], reach: range, known: dict[str, str], name: str
) -> None:
    __tracebackhide__ = True
    for check in forbidden:
        place = next((i for i in reach if _fits(check, lines[i], dict(known))), None)
        if place is not None:
            raise AssertionError(
                f"{name}:{check.line}: CHECK-NOT: {check.text}\n  stands in line {place + 1} of the text:\n"
                f"  > {lines[place]}"
            )


def _missing(check: _Check, lines: Sequence[str], at: int, name: str) -> str:
    shown = [f"  {number + 1:>4}  {lines[number]}" for number in range(max(0, at - 2), min(at + 3, len(lines)))]
    near = difflib.get_close_matches(check.text, lines, 3, 0.4)
    near += [line for line in lines if _word(check.text) in line and line not in near][: 3 - len(near)]
    places = [f"  {lines.index(line) + 1:>4}  {line}" for line in near]
    kind = "CHECK-NEXT" if check.kind == "NEXT" else "CHECK"
    where = "is not in" if check.kind == "NEXT" else "is not in or after"
    return "\n".join(
        [f"{name}:{check.line}: {kind}: {check.text}", f"  {where} line {at + 1} of the text:", *shown]
        + (["  lines that come near:", *places] if places else [])
    )


def _word(text: str) -> str:
    """The longest word of a pattern."""
    return max(re.findall(r"[\w.]+", text), key=len, default=text)
