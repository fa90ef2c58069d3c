"""Progress of reading many bytes, for people."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LoadProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as often as there is news."""


@contextmanager
def progress_bar(title: str) -> Iterator[LoadProgress | None]:
    """A bar with rate and time left on stderr, gone when done; None, so no reports, without rich or a terminal."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
