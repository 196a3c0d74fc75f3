"""A view as exactly as many lines as the terminal has. The only module here that knows rich.

Text reaches rich as Text, never as a string: a string would be read as markup, and an engine
chooses some of the words. Colour is never the only sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stallwatch.cli.output import age, since
from stallwatch.top.columns import ENGINES, GAP, LANES, STALLS, Giving, fit
from stallwatch.top.rows import EngineRow, LaneRow, Picture, StallRow
from stallwatch.top.view import Mode, View, lanes

HELP: Final = (
    "up down j k   select an engine",
    "d or enter    describe it, and back to its lanes",
    "/             filter its lanes by address, class or phase; esc ends the filter",
    "page keys     scroll; home and end too",
    "r             restart it, after a y",
    "?             this help, and back",
    "q             quit",
    "",
    "USED is the part of its limit that a lane's phase has spent: yellow over half, red over all.",
)
_KEYS: Final = "q quit  d describe  r restart  / filter  ? help"
_READONLY_KEYS: Final = "q quit  d describe  / filter  ? help  (read-only)"
_GOOD: Final = ("ready",)
_BAD: Final = ("stalled", "failed", "exhausted", "unkillable")
_STALE_S: Final = 3.0
# Least widths of what changes at every look, so that columns keep their places.
_WIDTHS: Final = {"STATE": 10, "CLASS": 5, "PHASE": 16, "AGE": 6, "LIMIT": 6, "USED": 4}
_RIGHT: Final = ("AGE", "LIMIT", "USED")


@dataclass(frozen=True, slots=True)
class Scene:
    """What is drawn. stale_s: the picture's age; trouble: why it is not newer, or ''."""

    view: View
    picture: Picture
    where: str
    stale_s: float = 0.0
    trouble: str = ""


def draw(scene: Scene, width: int, height: int) -> RenderableType:
    """`height` lines, cut where the terminal ends; a small terminal loses stalls, then lanes."""
    top = [_title(scene)]
    bottom = [_footer(scene.view)]
    room = max(0, height - 2)
    middle = _middle(scene, width, room)
    middle += [Text("")] * (room - sum(_lines(each) for each in middle))
    return Group(*[*top, *middle, *bottom][: max(1, height)])


def _lines(part: RenderableType) -> int:
    return part.row_count + 1 if isinstance(part, Table) else 1


def _line(words: str, style: str = "") -> Text:
    return Text(words, style=style, no_wrap=True, overflow="ellipsis")


def _title(scene: Scene) -> Text:
    if scene.trouble or scene.stale_s > _STALE_S:
        why = scene.trouble or "no answer yet"
        return _line(f"{age(scene.stale_s)} old: {why}", "bold red")
    count = len(scene.picture.engines)
    bad = [each for each in scene.picture.engines if each.state in _BAD]
    said = f"{count} engine{'' if count == 1 else 's'}"
    said += f", {bad[0].name} is {bad[0].state.upper()}: {bad[0].reason}" if bad else ""
    return _line(f"stallwatch  {scene.where}  {said}", "bold")


def _footer(view: View) -> Text:
    if view.mode is Mode.CONFIRM and view.question:
        return _line(f"Restart {view.question.engine}? y/n", "bold yellow")
    if view.mode is Mode.FILTER:
        return _line(f"/{view.words}_", "bold")
    return _line(view.message or (_READONLY_KEYS if view.readonly else _KEYS), "reverse")


def _middle(scene: Scene, width: int, room: int) -> list[RenderableType]:
    view, picture = scene.view, scene.picture
    if view.mode is Mode.HELP:
        return [_line(each) for each in HELP[:room]]
    names = [each.name for each in picture.engines]
    at = names.index(view.engine) if view.engine in names else 0
    most = max(1, room // 4)
    shown = picture.engines[_first(at, most, len(names)) :][:most]
    parts: list[RenderableType] = [_engines(shown, view.engine, width)]
    left = room - len(shown) - 1
    stalls = picture.stalls[: min(5, left // 4)]
    below: list[RenderableType] = []
    if left >= 8:
        below = [Text(""), _stalls(stalls, width) if stalls else _line("No stalls.", "dim")]
    left -= sum(_lines(each) for each in below)
    if left < 3:
        return parts if room > len(shown) else []
    describes = view.mode is Mode.DESCRIBE
    body = _describe(scene, left - 1) if describes else _lanes(scene, width, left - 1)
    fill = [Text("")] * (left - 1 - sum(_lines(each) for each in body))
    return [*parts, Text(""), *body, *fill, *below]


def _first(at: int, most: int, count: int) -> int:
    """The first row to show of `count` so that row `at` is among the `most` that are shown."""
    return max(0, min(at - most // 2, count - most))


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[Text]], giving: Giving, width: int
) -> Table:
    """Columns two blanks apart; the last one takes what is left and is cut first."""
    last = heads[-1]
    wants = {
        head: max(_WIDTHS.get(head, 0), cell_len(head), *(cell_len(row[n].plain) for row in rows))
        for n, head in enumerate(heads)
    } | {last: cell_len(last)}
    found = fit(wants, giving, width)
    table = Table(
        box=None, pad_edge=False, padding=(0, GAP, 0, 0), expand=last in found, header_style="dim"
    )
    for head, wide in found.items():
        table.add_column(
            Text(head),
            no_wrap=True,
            overflow="ellipsis",
            width=None if head == last else wide,
            justify="right" if head in _RIGHT else "left",
            ratio=1 if head == last else None,
        )
    for row in rows:
        table.add_row(*(cell for head, cell in zip(heads, row, strict=True) if head in found))
    return table


def _state(state: str) -> Text:
    return Text(state, style="green" if state in _GOOD else "red" if state in _BAD else "yellow")


def _engines(rows: Sequence[EngineRow], selected: str, width: int) -> Table:
    def cells(row: EngineRow) -> tuple[Text, ...]:
        chosen = row.name == selected
        return (
            Text(f"> {row.name}" if chosen else f"  {row.name}", style="bold" if chosen else ""),
            _state(row.state),
            Text(str(row.incarnation)),
            Text(row.restarts),
            Text(age(row.age_s)),
            Text(row.last_stall or "-"),
            Text(row.reason),
        )

    heads = ("  ENGINE", "STATE", "INC", "RESTARTS", "AGE", "LAST-STALL", "WHY")
    return _table(heads, [cells(row) for row in rows], ENGINES, width)


def _lanes(scene: Scene, width: int, room: int) -> list[RenderableType]:
    """One line that says what is shown, and the lanes from `scroll` on: only those are laid out."""
    view, known = scene.view, scene.picture.detail
    found = lanes(view, scene.picture)
    if known.name != view.engine:
        return [_line(f"Looking at {view.engine} ..." if view.engine else "No engines.", "dim")]
    if not known.lanes:
        return [_line(f"{view.engine} has no lanes now: it sends no heartbeats.", "dim")]
    rows = found[view.scroll :][: max(0, room - 2)]
    said = f"Lanes of {view.engine}: {len(found)} of {len(known.lanes)}"
    said += f", filter {view.words!r}" if view.words else ""
    if len(rows) < len(found):
        said += f", from number {view.scroll + 1}"
    return [_line(said, "bold"), *([_lane_table(rows, width)] if rows else ())]


def _lane_table(rows: Sequence[LaneRow], width: int) -> Table:
    def cells(row: LaneRow) -> tuple[Text, ...]:
        style = "red" if row.used > 1 else "yellow" if row.used > 0.5 else ""
        limited = row.limit_s > 0
        return (
            Text(row.address),
            Text(row.cls),
            Text(row.phase),
            Text(age(row.age_s), style=style),
            Text(age(row.limit_s) if limited else "-"),
            Text(f"{min(row.used, 9.99):.0%}" if limited else "-", style=style),
            Text(row.notes),
        )

    heads = ("LANE", "CLASS", "PHASE", "AGE", "LIMIT", "USED", "DETAILS")
    return _table(heads, [cells(row) for row in rows], LANES, width)


def _describe(scene: Scene, room: int) -> list[RenderableType]:
    known = scene.picture.detail
    if known.name != scene.view.engine:
        return [
            _line(f"Looking at {scene.view.engine} ..." if scene.view.engine else "No engines.")
        ]
    said = [_line(f"{key:>12}: {value}") for key, value in known.fields]
    said += [
        _line(
            f"{each.address:>12}: pid {each.pid}, state {each.state}, pending {each.pending},"
            f" {each.rss_bytes / 2**20:.0f} MiB, {each.comm}"
        )
        for each in known.processes
    ]
    return [_line(f"Engine {known.name}", "bold"), *said[scene.view.scroll :][: max(0, room - 1)]]


def _stalls(rows: Sequence[StallRow], width: int) -> Table:
    def cells(row: StallRow) -> tuple[Text, ...]:
        return (
            Text(row.id.rpartition("-")[2]),
            Text(row.engine),
            Text(row.kind, style="red"),
            Text(since(row.detected_at)),
            Text(row.culprit),
        )

    heads = ("STALL", "ENGINE", "KIND", "AGE", "CULPRIT")
    return _table(heads, [cells(row) for row in rows], STALLS, width)
