"""Arguments of nodes as text and back.

    %mm  %p3..%p9        nodes; a run of parameters of one form
    [1, 2]  (1, 2)       lists, tuples         1:max  ::2     slices; max: the end of a slice that has none
    3  0.5  True  None   numbers and the like  "root"  f32  cpu  torch.strided

Whatever else an argument may be is shown as ``<type>`` and cannot be read back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ep_fx.graph.values import SHORT, dtype_text

_LONG_RUN = 4
"""So many consecutive names of one form are shown as ``%p3..%p9``."""
_WHOLE = 2**63 - 1
_PLAIN = (bool, int, float, complex, torch.device, torch.memory_format, torch.layout)
_FORM = re.compile(r"(%p)(\d+)(\.\w+)?$")
_DTYPES = {short: dtype for dtype, short in SHORT.items()}
_NAMED = {
    "None": None, "True": True, "False": False, "max": _WHOLE, "inf": float("inf"), "nan": float("nan"),
    "infj": complex(0, float("inf")), "nanj": complex(0, float("nan")),
}  # fmt: skip
_NUMBER = r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)"
_TOKEN = re.compile(
    rf"""\s*(?:(?P<node>%\w+(?:\.\w+)*) | (?P<text>"(?:[^"\\]|\\.)*") | (?P<complex>\({_NUMBER}[+-]{_NUMBER[2:]}j\))
    | (?P<number>{_NUMBER}j?(?![\w.])) | (?P<word>[A-Za-z_][\w.]*(?:(?<!\bmax):\d+)?) | (?P<dots>\.\.\.?)
    | (?P<sign>[\[\](){{}},:=]))""",
    re.VERBOSE,
)

_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)=")


class Writer:
    """Texts of arguments.

    Args:
        name: stable name of a node, without the leading ``%``.
        size: text of a symbolic size.
    """

    def __init__(self, name: Callable[[fx.Node], str], size: Callable[[Any], str]) -> None:
        self._name, self._size = name, size

    def value(self, value: Any) -> str:
        """One argument; never an address or anything else that differs between runs."""
        if isinstance(value, fx.Node):
            return f"%{self._name(value)}"
        if isinstance(value, list):
            return f"[{', '.join(shorten([self.value(item) for item in value]))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.value(k)}: {self.value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            parts = [value.start, value.stop] if value.step is None else [value.start, value.stop, value.step]
            return ":".join("" if part is None else self.value(part) for part in parts)
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return literal_text(value)


def literal_text(value: Any) -> str:
    """Text of an argument that holds no node and no other argument."""
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) and value == _WHOLE:
        return "max"
    if value is ...:
        return "..."
    return str(value) if value is None or isinstance(value, _PLAIN) else f"<{type(value).__name__}>"


def shorten(names: Sequence[str]) -> list[str]:
    """Runs of consecutive parameters of one form as ``first..last``."""
    result: list[str] = []
    start = 0
    for i in range(1, len(names) + 1):
        if i < len(names) and _follows(names[i - 1], names[i]):
            continue
        run = names[start:i]
        result += [f"{run[0]}..{run[-1]}"] if len(run) >= _LONG_RUN else run
        start = i
    return result


def _follows(left: str, right: str) -> bool:
    if not left.startswith("%p"):
        return False
    a, b = _FORM.match(left), _FORM.match(right)
    return bool(a and b and int(b[2]) == int(a[2]) + 1 and a[3] == b[3])


class Reader:
    """Reads one line from left to right.

    Args:
        text: the line.
        nodes: node of each name, with its leading ``%``.
    """

    def __init__(self, text: str, nodes: Mapping[str, fx.Node]) -> None:
        self.text, self.at, self._nodes = text, 0, nodes

    def peek(self) -> re.Match[str] | None:
        """The next token."""
        return _TOKEN.match(self.text, self.at)

    def take(self, sign: str) -> bool:
        """Whether `sign` comes next; if so, it is read."""
        match = self.peek()
        if match is None or match["sign"] != sign:
            return False
        self.at = match.end()
        return True

    def expect(self, sign: str) -> None:
        """Reads `sign`.

        Raises:
            ValueError: something else comes next.
        """
        if not self.take(sign):
            raise ValueError(f"expected {sign!r} at {self.text[self.at :][:40]!r}")

    def word(self) -> str:
        """Reads a word: the name of an operator or of a keyword."""
        match = self.peek()
        if match is None or match["word"] is None:
            raise ValueError(f"expected a name at {self.text[self.at :][:40]!r}")
        self.at = match.end()
        return match["word"]

    def keyword(self) -> str | None:
        """Reads ``name=`` and returns the name; None where something else comes next."""
        match = _KEYWORD.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[1]

    def rest(self) -> str:
        """What has not been read."""
        return self.text[self.at :].strip()

    def items(self, closing: str) -> list[Any]:
        """Values up to the sign `closing`, which is read too."""
        found: list[Any] = []
        while not self.take(closing):
            if found:
                self.expect(",")
                if self.take(closing):
                    break
            found += self._run()
        return found

    def _run(self) -> list[Any]:
        """One value, or the nodes of ``%p3..%p9``."""
        first = self.peek()
        value = self.value()
        dots = self.peek()
        if first is None or dots is None or dots["dots"] != ".." or first["node"] is None:
            return [value]
        self.at = dots.end()
        last = self.peek()
        a, b = _FORM.match(first["node"]), _FORM.match(last["node"] or "") if last else None
        if last is None or a is None or b is None or a[3] != b[3]:
            raise ValueError(f"expected the last of the nodes that {first['node']}.. begins")
        self.at = last.end()
        return [self._node(f"%p{i}{a[3] or ''}") for i in range(int(a[2]), int(b[2]) + 1)]

    def value(self) -> Any:
        """Reads one argument, a slice too.

        Raises:
            ValueError: no argument that can be read back stands here.
        """
        parts: list[Any] = [None if self._at_colon() else self._single()]
        while self.take(":"):
            parts.append(None if self._at_end_of_slice() else self._single())
        return parts[0] if len(parts) == 1 else slice(*parts)

    def _at_colon(self) -> bool:
        match = self.peek()
        return match is not None and match["sign"] == ":"

    def _at_end_of_slice(self) -> bool:
        match = self.peek()
        return match is None or match["sign"] in (":", ",", "]", ")", "}")

    def _single(self) -> Any:
        match = self.peek()
        if match is None:
            raise ValueError(f"expected an argument at {self.text[self.at :][:40]!r}")
        self.at = match.end()
        kind, token = match.lastgroup, match[0].strip()
        if kind == "node":
            return self._node(token)
        if kind == "text":
            return json.loads(token)
        if kind in ("number", "complex"):
            return _number(token)
        if kind == "word":
            return _named(token)
        if token == "...":
            return ...
        if token == "[":
            return self.items("]")
        if token == "(":
            return tuple(self.items(")"))
        if token == "{":
            return self._dict()
        raise ValueError(f"expected an argument, got {token!r}")

    def _dict(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        while not self.take("}"):
            if found:
                self.expect(",")
            key = self._single()
            self.expect(":")
            found[key] = self.value()
        return found

    def _node(self, name: str) -> fx.Node:
        if name not in self._nodes:
            raise ValueError(f"no value {name} above this line")
        return self._nodes[name]


def _number(token: str) -> int | float | complex:
    if token.endswith(("j", ")")):
        return complex(token)
    return int(token) if re.fullmatch(r"-?\d+", token) else float(token)


def _named(word: str) -> Any:
    """What a bare word stands for."""
    if word in _NAMED:
        return _NAMED[word]
    if word in _DTYPES:
        return _DTYPES[word]
    found = getattr(torch, word.removeprefix("torch."), None)
    if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        return found
    try:
        return torch.device(word)
    except RuntimeError:
        raise ValueError(f"{word!r} is no dtype, no device, and no other word that an argument may be") from None
