"""Exit codes, and the one way in which a command fails: a code and a line for the user."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Exit codes of ``ep-fx``."""

    OK = 0
    BROKEN = 1
    INPUT = 2
    CAPTURE = 3
    BUG = 4
    STOPPED = 130
    PIPE = 141


MEANING = {
    Code.OK: "fine: all rules hold, the graphs are the same",
    Code.BROKEN: "a rule is broken, the graphs differ, an MoE region has no kernel, or there is no NPU to run on",
    Code.INPUT: "the arguments, the file, the model's name or its config are wrong",
    Code.CAPTURE: "the model cannot be captured as one graph",
    Code.BUG: "an error that ep-fx did not foresee (--debug shows its trace), or the output cannot be written",
    Code.STOPPED: "interrupted",
    Code.PIPE: "whatever read the output has closed it, as head does; nothing is said",
}
"""What each exit code says."""


class FailedError(Exception):
    """A command failed.

    Args:
        code: the exit code.
        message: for the user; shown as one line.
    """

    def __init__(self, code: Code, message: str) -> None:
        self.code = code
        super().__init__(" ".join(message.split()))


class OutputError(FailedError):
    """Stdout takes nothing any more: a closed pipe, a full disk."""
