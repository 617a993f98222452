"""Where commands print, and how they show that they are at work."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["wide_console", "with_time_left"]


def wide_console() -> Console:
    """The terminal as wide as it is; a file or a pipe with room for the tables of results."""
    return Console() if sys.stdout.isatty() else Console(width=130)


def with_time_left(console: Console) -> Progress:
    """A progress bar that says what is being done, how far it is and how long it will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)
