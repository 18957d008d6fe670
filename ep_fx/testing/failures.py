"""What became of each rank of a call that failed: the exception, a short traceback, and where the others were.

    rank 2 of 4 failed: ValueError: no token for expert 3
      test_moe.py:41 in body
        raise ValueError(f"no token for expert {expert}")
        where expert = 3
    ranks 0, 1, 3 were still running:
      test_moe.py:43 in body
        dist.barrier()
      .. 3 frames in torch

Frames of installed packages and of this one are counted, not shown; the whole traceback is kept beside.
"""
from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import torch

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = re.compile(r".*[/\\\\](?:site|dist)-packages[/\\\\]([^/\\\\]+)")
_FOREIGN = (sysconfig.get_path("stdlib"), str(_PACKAGE), str((_PACKAGE / "passes").resolve()), "<frozen", "<string>")
_RUNNER = ("_serve", "_answer", "<lambda>", "_execute", "_body")
"""Functions of this package between the start of a rank and the user's function."""
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_LONGEST = 120
"""Characters of a value that are shown."""


@dataclass(frozen=True)
class RankState:
    """Where one rank was when its call was given up.

    Args:
        rank: its number.
        state: "died" with its process, "failed" with an exception, still "running", or "finished".
        text: what happened, in lines: the first one names the exception or the exit code.
    """

    rank: int
    state: Literal["died", "failed", "running", "finished"]
    text: str = ""


def describe(states: Sequence[RankState]) -> str:
    """The states as text, causes first; ranks of which the same is to say share a paragraph."""
    groups: dict[tuple[str, str], list[int]] = {}
    for kind in ("died", "failed", "running", "finished"):
        for state in states:
            if state.state == kind:
                groups.setdefault((kind, state.text), []).append(state.rank)
    return "\n".join(_paragraph(kind, text, ranks, len(states)) for (kind, text), ranks in groups.items())


def _paragraph(kind: str, text: str, ranks: list[int], world_size: int) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if kind in ("died", "failed"):
        return f"{who} of {world_size} {'failed' if kind == 'failed' else 'died'}: {text}"
    verb = "was" if len(ranks) == 1 else "were"
    return f"{who} {verb} still running:\n{text}" if kind == "running" else f"{who} had finished"


def short_traceback(error: BaseException) -> str:
    """The exception, the frames of the user's own code, and the values of the names in the line that failed."""
    said = "".join(traceback.format_exception_only(error)).strip()
    lines = [said if str(error) else type(error).__name__]
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]
    lines += _frame_lines(places)
    own = [(frame, line) for frame, line in frames if not _is_foreign(frame.f_code.co_filename)]
    if own:
        lines += _values(*own[-1])
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        lines.append(f"  after {''.join(traceback.format_exception_only(before)).strip()}")
    return "\n".join(lines)


def short_stack(dump: str) -> str:
    """What `faulthandler` wrote of the thread that runs the function, most recent call last."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) )", dump.strip())
    found = [list(reversed(_FRAME.findall(thread))) for thread in threads]
    serving = [frames for frames in found if any(name in _RUNNER for _, _, name in frames)]
    lines = _frame_lines([(file, int(line), name) for file, line, name in (serving or [[]])[-1]])
    return "\n".join(lines) or f"  {dump.strip() or 'it did not say where'}"


def _is_foreign(file: str) -> bool:
    return file.startswith(_FOREIGN) or _INSTALLED.match(file) is not None


def _frame_lines(places: Sequence[tuple[str, int, str]]) -> list[str]:
    """The user's frames with their source line; runs of others as a count."""
    lines: list[str] = []
    hidden: list[str] = []
    runner = [i for i, (file, _, name) in enumerate(places) if name in _RUNNER and _is_foreign(file)]
    for file, number, name in places[runner[-1] + 1 :] if runner else places:
        if _is_foreign(file):
            hidden.append(_owner(file))
            continue
        lines += _hidden_line(hidden)
        hidden = []
        lines.append(f"  {Path(file).name}:{number} in {name}")
        source = linecache.getline(file, number).strip()
        lines += [f"    {source}"] if source else []
    return lines + _hidden_line(hidden)


def _hidden_line(owners: list[str]) -> list[str]:
    if not owners:
        return []
    count = "1 frame" if len(owners) == 1 else f"{len(owners)} frames"
    return [f"  .. {count} in {', '.join(dict.fromkeys(owners))}"]


def _owner(file: str) -> str:
    """The package that a file belongs to."""
    installed = _INSTALLED.match(file)
    if installed is not None:
        return installed[1].removesuffix(".py")
    return _PACKAGE.name if file.startswith(_FOREIGN[1:3]) else "python"


def _values(frame: FrameType, number: int) -> list[str]:
    """``where name = value`` for the local names in a source line."""
    names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", linecache.getline(frame.f_code.co_filename, number)))
    shown = []
    for name in names:
        value = frame.f_locals.get(name, _values)
        if value is not _values and not callable(value) and not isinstance(value, ModuleType):
            shown.append(f"    where {name} = {_text(value)}")
    return shown


def _text(value: Any) -> str:
    try:
        if isinstance(value, torch.Tensor) and (not isinstance(value.numel(), int) or value.numel() > 16):
            return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
        text = " ".join(repr(value).split())
    except Exception as error:  # a value that cannot be shown must not hide the failure
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."
