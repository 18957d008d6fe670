"""The application: its commands, its help, and what becomes of an error."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import torch
import typer

from ep_fx.cli.bench import bench
from ep_fx.cli.diff import diff
from ep_fx.cli.doctor import doctor
from ep_fx.cli.explain import explain
from ep_fx.cli.failure import MEANING, Code, FailedError, OutputError
from ep_fx.cli.output import drop_output, flush, print_json, print_text
from ep_fx.cli.transform import transform
from ep_fx.cli.verify import verify
from ep_fx.cli.view import view
from ep_fx.graph import PassError
from ep_fx.verify import VerificationError

COMMANDS = (transform, explain, verify, view, diff, bench, doctor)
_CODES = "\n\n".join(f"{code.value}: {meaning}" for code, meaning in MEANING.items())
app = typer.Typer(
    name="ep-fx",
    help="Capture, explain, verify and picture MoE training steps: no weights, no device, one process.",
    epilog=f"Exit codes\n\n{_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in COMMANDS:
    app.command()(_command)


def _version(asked: bool) -> None:
    if asked:
        try:
            own = importlib.metadata.version("ep_fx")
        except importlib.metadata.PackageNotFoundError:
            own = "of a checkout that is not installed"
        print_text(f"ep-fx {own}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="print the versions of ep_fx and torch", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the trace of an error; may stand anywhere")] = False,
) -> None:
    """Capture, explain, verify and picture MoE training steps: no weights, no device, one process."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code (`failure.Code`); an error is one line on stderr.

    Args:
        arguments: without the program's name; None: those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        with _torch_logs(shown=debug or "TORCH_LOGS" in os.environ):
            result = app([part for part in given if part != "--debug"], prog_name="ep-fx", standalone_mode=False)
        flush()
        return int(result or 0)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer's answer to a closed pipe
            drop_output()
            return int(Code.PIPE)
        return _failed(error, as_json="--json" in given, debug=debug)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _failed(error, as_json="--json" in given, debug=debug)


@contextmanager
def _torch_logs(shown: bool) -> Iterator[None]:
    """What torch logs while it captures: of an error, the same once more and its trace, which come with ``--debug``."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    levels = {} if shown else {logging.getLogger(name): logging.getLogger(name).level for name in ["torch", *names]}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _failed(error: Exception | SystemExit, as_json: bool, debug: bool) -> int:
    try:
        code, message = _verdict(error)
        if as_json and not isinstance(error, OutputError):
            print_json({"error": message, "exit_code": int(code)})
    except OutputError as lost:
        code, message = lost.code, str(lost)
    if code is Code.PIPE or not message:  # without arguments typer has shown its help
        return int(code)
    unforeseen = code in (Code.CAPTURE, Code.BUG) and not isinstance(error, OutputError)
    hint = " (--debug shows the trace)" if unforeseen and not debug else ""
    print(f"ep-fx: {message}{hint}", file=sys.stderr)
    return int(code)


def _verdict(error: Exception | SystemExit) -> tuple[Code, str]:
    """The exit code of an error, and what is said of it in one line."""
    if isinstance(error, FailedError):
        return error.code, str(error)
    if isinstance(error, typer.TyperException):  # an unknown option, a missing argument
        return Code.INPUT, error.format_message()
    if isinstance(error, typer.Abort):
        return Code.STOPPED, "interrupted"
    broken = error if isinstance(error, VerificationError) else error.__cause__
    if isinstance(broken, VerificationError):
        print_text(broken.report.explain())
        return Code.BROKEN, f"broken rules: {', '.join(broken.report.broken)}"
    code = Code.CAPTURE if isinstance(error, PassError) else Code.BUG
    return code, " ".join(f"{type(error).__name__}: {error}".split())
