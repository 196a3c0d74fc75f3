"""The last log lines for a person: a run of the same access log line is one line and a count."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_ACCESS = re.compile(r'"?\b(GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH) (/\S*) HTTP/[\d.]+"? (\d{3})')


def collapse(lines: Sequence[str]) -> Iterator[str]:
    """The first of each run, then '... N similar lines'. Other lines only when exactly equal."""
    run, last = 0, ""
    for line in lines:
        key = _key(line)
        if run and key == last:
            run += 1
            continue
        yield from _rest(run)
        yield line
        run, last = 1, key
    yield from _rest(run)


def _rest(run: int) -> Iterator[str]:
    if run > 1:
        yield f"... {run - 1} similar line{'' if run == 2 else 's'}"


def _key(line: str) -> str:
    found = _ACCESS.search(line)
    if found is None:
        return line
    return f"{found[1]} {found[2].partition('?')[0]} {found[3]}"
