"""The view of `top` as a function of keys."""

from __future__ import annotations

from dataclasses import replace

from stallwatch.top.rows import Detail, EngineRow, LaneRow, Picture
from stallwatch.top.view import (
    MAX_FILTER,
    READONLY,
    Mode,
    Order,
    Quit,
    Restart,
    View,
    lanes,
    press,
    settle,
)


def engine(name: str, incarnation: int = 1) -> EngineRow:
    return EngineRow(name, "ready", incarnation, "0/5", 1.0, "", "")


def picture(*names: str, incarnation: int = 1, lanes_of: str = "a", count: int = 30) -> Picture:
    rows = tuple(LaneRow(f"worker:{n}/model", "work", "step", 1.0, 9.0, "") for n in range(count))
    return Picture(tuple(engine(n, incarnation) for n in names), Detail(lanes_of, (), (), rows))


def typed(view: View, seen: Picture, *keys: str) -> tuple[View, Order]:
    order: Order = None
    for key in keys:
        view, order = press(view, key, seen)
    return view, order


def test_arrows_and_letters_select_and_stop_at_the_ends() -> None:
    """j, k and the arrows walk through the engines and not beyond them."""
    seen = picture("a", "b", "c")
    view = View(engine="a")

    assert typed(view, seen, "k")[0].engine == "a"
    assert typed(view, seen, "j", "down")[0].engine == "c"
    assert typed(view, seen, "j", "j", "j", "up")[0].engine == "b"


def test_the_selection_is_a_name_not_a_place() -> None:
    """A new engine above the selected one does not shift the selection; a vanished one loses it."""
    view = settle(View(engine="b"), picture("a", "b"))

    assert settle(view, picture("0", "a", "b")).engine == "b"
    assert settle(view, picture("a")).engine == "a"
    assert settle(view, Picture()).engine == ""


def test_only_a_y_restarts_and_only_what_was_asked_for() -> None:
    """r asks; y restarts the engine of the question, everything else nothing, not even Enter."""
    seen = picture("a", "b")

    view, order = typed(View(engine="b"), seen, "r")
    assert (view.mode, order) == (Mode.CONFIRM, None)
    assert press(view, "y", seen)[1] == Restart("b")
    for key in ("n", "enter", "esc", "q", "r", " "):
        after, order = press(view, key, seen)
        assert (after.mode, order) == (Mode.LANES, None)


def test_a_y_that_comes_too_late_restarts_nothing() -> None:
    """When the engine of the question has restarted or gone meanwhile, y does nothing."""
    view, _ = typed(View(engine="a"), picture("a", "b"), "r")

    assert press(view, "y", picture("a", "b", incarnation=2))[1] is None
    assert press(view, "y", picture("b"))[1] is None


def test_read_only_never_asks() -> None:
    """With --readonly no keys lead to an order other than to quit."""
    view, order = typed(View(engine="a", readonly=True), picture("a"), "r", "y")

    assert order is None
    assert typed(View(engine="a", readonly=True), picture("a"), "r")[0].message == READONLY
    assert press(view, "q", picture("a"))[1] == Quit()


def test_a_filter_is_typed_kept_and_dropped() -> None:
    """/ types a filter, q among its letters; Enter keeps it, Esc drops it, its length is bounded."""
    seen = picture("a")
    view, order = typed(View(engine="a"), seen, "/", "q", "backspace", *"worker:7", "enter")

    assert order is None
    assert [row.address for row in lanes(view, seen)] == ["worker:7/model"]
    assert len(lanes(press(view, "esc", seen)[0], seen)) == 30
    assert len(typed(View(engine="a"), seen, "/", *"x" * 200)[0].words) == MAX_FILTER


def test_scrolling_stays_within_the_rows() -> None:
    """Page keys, home and end move within the lanes, also when there are fewer of them later."""
    seen = picture("a")
    view = typed(View(engine="a"), seen, "pagedown", "pagedown", "pagedown", "pagedown")[0]

    assert view.scroll == 29
    assert settle(view, picture("a", count=3)).scroll == 2
    assert press(view, "home", seen)[0].scroll == 0
    assert press(replace(view, scroll=5), "pageup", seen)[0].scroll == 0


def test_lanes_of_another_engine_are_not_shown_as_the_selected_ones() -> None:
    """Until the selected engine's lanes have come, none are shown."""
    assert lanes(View(engine="b"), picture("a", "b", lanes_of="a")) == ()


def test_help_and_description_come_and_go() -> None:
    """? and d open and close what they name; q leaves from everywhere."""
    seen = picture("a")

    assert typed(View(engine="a"), seen, "?")[0].mode is Mode.HELP
    assert typed(View(engine="a"), seen, "?", "x")[0].mode is Mode.LANES
    assert typed(View(engine="a"), seen, "d")[0].mode is Mode.DESCRIBE
    assert typed(View(engine="a"), seen, "d", "d")[0].mode is Mode.LANES
    assert typed(View(engine="a"), seen, "?", "q")[1] == Quit()


def test_keys_without_engines_do_no_harm() -> None:
    """With no engine at all every key leaves a view that still answers."""
    view = View()
    for key in ("j", "k", "r", "y", "d", "pagedown", "end", "/", "x", "enter", "?", "esc", "home"):
        view, order = press(view, key, Picture())
        assert order is None
