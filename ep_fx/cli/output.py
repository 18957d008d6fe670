"""What a command prints: rich tables on a terminal, plain text in a pipe, one JSON object with ``--json``.

Results go to stdout, progress and errors to stderr. A bar appears for work that takes more than two seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich.table
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn

from ep_fx.cli.failure import Code, OutputError
from ep_fx.explain import Table

_PATIENCE = 2.0


def print_text(text: str) -> None:
    """Plain text, as it is."""
    _write(text if text.endswith("\n") else f"{text}\n")


def print_json(value: Any) -> None:
    """One JSON object."""
    _write(f"{json.dumps(value, indent=2)}\n")


def flush() -> None:
    """Writes what waits in stdout.

    Raises:
        OutputError: it takes nothing any more.
    """
    _write("")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        drop_output()
        code = Code.PIPE if isinstance(error, BrokenPipeError) else Code.BUG
        raise OutputError(code, f"cannot write the output: {error.strerror}") from error


def drop_output() -> None:
    """Leads stdout nowhere, so that what waits in it is not tried again when Python ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def print_table(table: Table) -> None:
    """A table, in colour where stdout is a terminal."""
    console = Console()
    if not console.is_terminal:
        print_text(f"{table}\n")
        return
    drawn = rich.table.Table(title=table.title, caption=table.note or None, title_justify="left")
    for index, column in enumerate(table.columns):
        drawn.add_column(column, style="bold cyan" if index == 0 else None, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(drawn)


class Stages:
    """The stages of a command, one bar each, on stderr.

    Args:
        shown: whether to show anything; a console that is no terminal shows nothing.
    """

    def __init__(self, shown: bool = True) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._shown = shown and console.is_terminal
        self._bars = Progress(*columns, console=console, transient=True)
        self._lock, self._closed = threading.Lock(), False
        self._timer = threading.Timer(_PATIENCE, self._open)
        self._timer.daemon = True

    def __enter__(self) -> Stages:
        if self._shown:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._bars.live.is_started:
                self._bars.stop()

    def _open(self) -> None:
        with self._lock:
            if not self._closed:
                self._bars.start()

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A stage of unknown length."""
        task = self._bars.add_task(title, total=None)
        yield
        self._bars.remove_task(task)

    @contextmanager
    def forward_of(self, model: nn.Module) -> Iterator[None]:
        """A capture: the bar counts the modules whose forward is through, then runs on for backward."""
        modules = [module for path, module in model.named_modules() if path]
        tasks = [self._bars.add_task("capture forward", total=len(modules))]

        def passed(*_: object) -> None:
            self._bars.advance(tasks[0])

        def turned(*_: object) -> None:
            self._bars.update(tasks[0], visible=False)
            tasks.append(self._bars.add_task("capture backward, passes", total=None))

        handles = [module.register_forward_hook(passed) for module in modules]
        handles.append(model.register_forward_hook(turned))
        try:
            yield
        finally:
            for task in tasks:
                self._bars.remove_task(task)
            for handle in handles:
                handle.remove()
