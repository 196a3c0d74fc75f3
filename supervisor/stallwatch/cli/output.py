"""Data on stdout, talk on stderr; nothing that a process wrote reaches the terminal as a control."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stallwatch.cli.settings import settings

WIDTH = 80
_COLORS = {
    "ready": "32",
    "suspect": "33",
    "starting": "33",
    "backoff": "33",
    "draining": "33",
    "stopping": "33",
    "stalled": "31",
    "failed": "31",
    "exhausted": "31",
    "unkillable": "31",
}


def clean(text: object) -> str:
    """The text on one line without controls: an engine's output must not drive a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text))


class ReaderGone(Exception):
    """Nobody reads our stdout any more. Not an OSError: click makes exit 1 of those."""


def out(line: str = "") -> None:
    try:
        sys.stdout.write(f"{line}\n")
    except BrokenPipeError:
        raise ReaderGone from None


def flush() -> None:
    """Show what was written, now."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def say(line: str) -> None:
    """A remark for a person."""
    if not settings().quiet:
        sys.stderr.write(f"{line}\n")


def out_json(value: Any) -> None:
    import json

    out(json.dumps(value, indent=2))


def out_json_line(value: Any) -> None:
    import json

    out(json.dumps(value, separators=(",", ":")))
    flush()


def age(seconds: float | None) -> str:
    """3m12s, 2h5m, 4d3h: two units at most."""
    if seconds is None or seconds < 0 or seconds != seconds:  # noqa: PLR0124  (NaN)
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s" if seconds < 1 or seconds % 1 else f"{seconds:.0f}s"
    left = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return "".join(parts[:2])


def since(stamp: str) -> str:
    """The age of an RFC 3339 time."""
    from datetime import UTC, datetime

    try:
        then = datetime.fromisoformat(stamp)
    except ValueError:
        return "-"
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return age(max(0.0, (datetime.now(UTC) - then).total_seconds()))


def colored() -> bool:
    """Colours when asked for, else on a terminal that has not said no."""
    chosen = settings().color
    if chosen is not None:
        return chosen
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _paint(cell: str) -> str:
    code = _COLORS.get(cell.strip())
    return f"\x1b[{code}m{cell}\x1b[0m" if code else cell


def cut(line: str) -> str:
    """The line, or as much of it as fits on a terminal. A file or a pipe gets all of it."""
    return line if len(line) <= WIDTH or not sys.stdout.isatty() else f"{line[: WIDTH - 1]}…"


def fitted(lines: Iterable[str]) -> Iterator[str]:
    """Lines broken to fit a terminal; a file or a pipe gets them whole, for grep."""
    if not sys.stdout.isatty():
        yield from lines
        return
    import shutil

    from stallwatch.evidence.wrap import wrap

    yield from wrap(lines, shutil.get_terminal_size((WIDTH, 24)).columns)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, fit: bool = True) -> None:
    """Aligned columns, two blanks apart. fit: on a terminal the last column is cut to fit in 80."""
    fit = fit and sys.stdout.isatty()
    cells = [[clean(cell) or "-" for cell in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(head), *cells]) for i in range(len(head))]
    room = WIDTH - sum(widths[:-1]) - 2 * (len(head) - 1)
    paint = colored()
    for number, row in enumerate([list(head), *cells]):
        last = row[-1]
        if fit and number and len(last) > max(room, 8):
            last = last[: max(room, 8) - 1] + "…"
        padded = [f"{cell:<{width}}" for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        if paint and number:
            padded = [_paint(cell) for cell in padded]
        out("  ".join([*padded, last]).rstrip())


def fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Right-aligned keys, as systemctl does."""
    shown = [(key, clean(value)) for key, value in pairs if value not in ("", None)]
    width = max((len(key) for key, _ in shown), default=0)
    for key, value in shown:
        out(f"{key:>{width}}: {value}")
