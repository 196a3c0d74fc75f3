"""What the person looks at, and what a key makes of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from stallwatch.top.rows import LaneRow, Picture

MAX_FILTER: Final = 64
_PAGE: Final = 10
READONLY: Final = "read-only: nothing is restarted from here"


class Mode(StrEnum):
    """What the keys mean now."""

    LANES = "lanes"
    DESCRIBE = "describe"
    HELP = "help"
    FILTER = "filter"  # typing one
    CONFIRM = "confirm"  # y restarts


@dataclass(frozen=True, slots=True)
class Question:
    """The engine a restart was asked for, as it was then."""

    engine: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class View:
    """State of the view. `engine` is the selected one's name, so that a new list cannot shift it."""

    engine: str = ""
    mode: Mode = Mode.LANES
    words: str = ""  # the lane filter
    scroll: int = 0
    message: str = ""
    readonly: bool = False
    question: Question | None = None


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Ask the daemon to restart this engine."""

    engine: str


Order = Quit | Restart | None


def lanes(view: View, picture: Picture) -> tuple[LaneRow, ...]:
    """The selected engine's lanes that pass the filter."""
    if picture.detail.name != view.engine:
        return ()
    return tuple(row for row in picture.detail.lanes if row.matches(view.words))


def settle(view: View, picture: Picture) -> View:
    """The view after a new picture: a vanished engine is not selected, nothing scrolls away."""
    engine = view.engine
    if picture.engine(engine) is None:
        engine = picture.engines[0].name if picture.engines else ""
    last = max(0, _length(view, picture) - 1)
    return replace(view, engine=engine, scroll=min(view.scroll, last))


def press(view: View, key: str, picture: Picture) -> tuple[View, Order]:
    """The view after a key, and what the key asks to be done."""
    if view.mode is Mode.FILTER:
        return _type(view, key), None
    if view.mode is Mode.CONFIRM:
        return _answer(view, key, picture)
    if key == "q":
        return view, Quit()
    if view.mode is Mode.HELP:
        return replace(view, mode=Mode.LANES), None
    view = replace(view, message="")
    match key:
        case "?":
            return replace(view, mode=Mode.HELP), None
        case "d" | "enter":
            other = Mode.LANES if view.mode is Mode.DESCRIBE else Mode.DESCRIBE
            return replace(view, mode=other, scroll=0), None
        case "esc":
            return replace(view, mode=Mode.LANES, words="", scroll=0), None
        case "/":
            return replace(view, mode=Mode.FILTER, scroll=0), None
        case "r":
            return _ask(view, picture), None
    return _move(view, key, picture), None


def _type(view: View, key: str) -> View:
    if key == "enter":
        return replace(view, mode=Mode.LANES)
    if key == "esc":
        return replace(view, mode=Mode.LANES, words="")
    if key == "backspace":
        return replace(view, words=view.words[:-1])
    if len(key) == 1 and len(view.words) < MAX_FILTER:
        return replace(view, words=view.words + key)
    return view


def _ask(view: View, picture: Picture) -> View:
    if view.readonly:
        return replace(view, message=READONLY)
    found = picture.engine(view.engine)
    if found is None:
        return replace(view, message="no engine is selected")
    return replace(view, mode=Mode.CONFIRM, question=Question(found.name, found.incarnation))


def _answer(view: View, key: str, picture: Picture) -> tuple[View, Order]:
    asked, view = view.question, replace(view, mode=Mode.LANES, question=None)
    if asked is None or key not in ("y", "Y"):
        return replace(view, message="nothing was restarted"), None
    found = picture.engine(asked.engine)
    if found is None or found.incarnation != asked.incarnation:
        # The y was meant for what the person saw; that engine has gone already.
        return replace(view, message=f"{asked.engine} is another one by now: not restarted"), None
    return replace(view, message=f"restarting {asked.engine} ..."), Restart(asked.engine)


def _move(view: View, key: str, picture: Picture) -> View:
    step = {"up": -1, "k": -1, "down": 1, "j": 1}.get(key)
    if step is not None:
        names = [each.name for each in picture.engines]
        if not names:
            return view
        at = names.index(view.engine) if view.engine in names else 0
        chosen = names[max(0, min(len(names) - 1, at + step))]
        return view if chosen == view.engine else replace(view, engine=chosen, scroll=0)
    last = max(0, _length(view, picture) - 1)
    by = {"pageup": -_PAGE, "pagedown": _PAGE, " ": _PAGE, "home": -last, "end": last}.get(key, 0)
    return replace(view, scroll=max(0, min(last, view.scroll + by)))


def _length(view: View, picture: Picture) -> int:
    """How many rows the part that scrolls has."""
    if view.mode is Mode.DESCRIBE:
        return len(picture.detail.fields) + len(picture.detail.processes)
    return len(lanes(view, picture))
