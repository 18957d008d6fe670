"""Options of a pass as text and back: a field's annotation says what it accepts.

    bool   true, false          int, float   3, 0.5           str   word, "any text"
    Literal, Enum               one of their words            X | None   what X accepts, or none

A field of another type has no text: it may be set in Python, and the pass then cannot be printed.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_RESERVED = frozenset({"true", "false", "none"})
_SIMPLE: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a word or a quoted text"}


class Word(NamedTuple):
    """A value as written: `quoted` where it stood in double quotes."""

    text: str
    quoted: bool = False


def hints(owner: type) -> dict[str, Any]:
    """Annotation of each field of the dataclass `owner`, in order."""
    found = get_type_hints(owner)
    return {field.name: found[field.name] for field in fields(owner) if field.init}


def required(owner: type) -> list[str]:
    """The fields of the dataclass `owner` that have no default."""
    return [f.name for f in fields(owner) if f.init and f.default is MISSING and f.default_factory is MISSING]


def accepted(annotation: Any) -> str:
    """What a field with this annotation takes, in words."""
    return " or ".join(_accepted(annotation)) or "a Python object: it has no text form"


def read(annotation: Any, word: Word) -> Any:
    """The value that `word` stands for.

    Raises:
        ValueError: nothing that the annotation accepts.
    """
    for option in _members(annotation):
        try:
            return _read(option, word)
        except ValueError:
            continue
    raise ValueError(f"expected {accepted(annotation)}, got {word.text!r}")


def fits(annotation: Any, value: Any) -> bool:
    """Whether `value` is one that the annotation accepts; True for an annotation that has no text form."""
    members = list(_members(annotation))
    return any(_fits(option, value) for option in members)


def write(value: Any) -> str:
    """The text of a value.

    Raises:
        TypeError: it has none.
    """
    if value is None:
        return "none"
    if isinstance(value, Enum):
        return _enum_word(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) and value not in _RESERVED else json.dumps(value, ensure_ascii=False)
    raise TypeError(f"a {type(value).__name__} has no text form: {value!r}")


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of a union; a literal and every simple type are their own."""
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _accepted(annotation: Any) -> Iterator[str]:
    for option in _members(annotation):
        if option is type(None):
            yield "none"
        elif get_origin(option) is Literal:
            yield ", ".join(write(value) for value in get_args(option))
        elif isinstance(option, type) and issubclass(option, Enum):
            yield ", ".join(_enum_word(member) for member in option)
        elif option in _SIMPLE:
            yield _SIMPLE[option]


def _read(option: Any, word: Word) -> Any:
    if option is type(None) and word == Word("none"):
        return None
    if get_origin(option) is Literal:
        return _named({write(value): value for value in get_args(option)}, word)
    if isinstance(option, type) and issubclass(option, Enum):
        return _named({_enum_word(member): member for member in option}, word)
    if option is bool and word in (Word("true"), Word("false")):
        return word.text == "true"
    if option in (int, float) and not word.quoted:
        return option(word.text)
    if option is str and (word.quoted or word.text not in _RESERVED):
        return word.text
    return _no(word)


def _named(values: dict[str, Any], word: Word) -> Any:
    return values[word.text] if word.text in values else _no(word)


def _no(word: Word) -> Any:
    raise ValueError(word.text)


def _fits(option: Any, value: Any) -> bool:
    if option is type(None):
        return value is None
    if get_origin(option) is Literal:
        return any(value == word and type(value) is type(word) for word in get_args(option))
    if option in (bool, int, str):
        return type(value) is option
    if option is float:
        return type(value) in (int, float)
    return option is Any or not isinstance(option, type) or isinstance(value, option)


def _enum_word(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name.lower()
