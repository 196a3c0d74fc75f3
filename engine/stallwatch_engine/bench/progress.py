"""A progress bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from stallwatch_engine.bench.result import Outcome, Result

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Context manager; `seen` takes each result. shown: False draws nothing and loads nothing."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total = total
        self._bad = 0
        self._progress: Progress | None = None
        if shown:
            self._progress = _progress()

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("requests", total=self._total, bad="")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def seen(self, result: Result) -> None:
        """One more request has ended."""
        if self._progress is None:
            return
        self._bad += result.outcome is not Outcome.COMPLETED
        bad = f"[red]{self._bad} not completed" if self._bad else ""
        self._progress.update(self._task, advance=1, bad=bad)


def _progress() -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[bad]}"),
        console=Console(file=sys.stderr),  # it honours NO_COLOR and TERM=dumb
        transient=True,
    )
