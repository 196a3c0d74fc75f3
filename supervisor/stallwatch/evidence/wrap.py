"""Long lines for a narrow terminal: a continuation stands under the text it belongs to. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

LEAST = 40
# A label ("kind      ..."), a time of the timeline ("  2.1 s  ..."), or only a margin.
_HEAD = re.compile(r"(?:[a-z][a-z ]{0,11}\s{2,}|\s+[\d.?]+ s\s{2,}|\s*)")


def wrap(lines: Iterable[str], width: int) -> Iterator[str]:
    """The lines, none wider than `width` characters. A word longer than a line is cut in two."""
    width = max(width, LEAST)
    for line in lines:
        if len(line) <= width:
            yield line
            continue
        found = _HEAD.match(line)
        head = found.group() if found is not None else ""
        margin = len(head) if head.strip() else len(head) + 2
        yield from textwrap.wrap(
            line[len(head) :],
            width,
            initial_indent=head,
            subsequent_indent=" " * min(margin, width // 2),
            break_on_hyphens=False,
        ) or [line[:width]]
