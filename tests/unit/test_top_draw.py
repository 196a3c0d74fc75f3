"""Drawings of `top`: exactly the terminal's lines, nothing of an engine interpreted, in little time."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console

from stallwatch.top.draw import Scene, draw
from stallwatch.top.rows import Picture, detail, engine_rows, stall_rows
from stallwatch.top.view import Mode, View

SGR = re.compile(r"\x1b\[[\d;]*m")


def large(hostile: str = "") -> Picture:
    """64 processes of 4 lanes, each at another part of its limit."""
    engine: dict[str, Any] = {
        "name": "chat", "state": "ready", "incarnation": 1, "restarts_in_window": 0, "budget": 5,
        "age_s": 44.0, "reason": f"up{hostile}", "command": [f"serve{hostile}"],
        "lanes": [
            {"address": f"worker:{p}/lane-{n}", "cls": "work", "phase": f"step{hostile}",
             "age_s": float(p), "limit_s": 60.0, "wait_on": hostile, "details": {f"k{hostile}": n}}
            for p in range(64) for n in range(4)
        ],
        "processes": [
            {"address": f"worker:{p}", "pid": p + 10, "state": "S", "comm": f"python{hostile}"}
            for p in range(64)
        ],
    }  # fmt: skip
    stalls = [
        {"id": f"st-1-{n:08x}", "engine": "chat", "kind": f"GIL_HELD{hostile}", "culprit": hostile}
        for n in range(8)
    ]
    return Picture(engine_rows({"items": [engine]}), detail(engine), stall_rows({"items": stalls}))


def render(scene: Scene, width: int, height: int, *, color: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        width=width, height=height, file=file, force_terminal=True, no_color=not color,
        color_system="standard", markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    console.print(draw(scene, width, height), end="")
    return file.getvalue()


def lines(scene: Scene, width: int, height: int) -> list[str]:
    return SGR.sub("", render(scene, width, height)).split("\n")[:-1]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (200, 60), (40, 12), (20, 5), (10, 2), (1, 1)]
)
def test_a_drawing_has_the_terminal_s_size(mode: Mode, width: int, height: int) -> None:
    """In every mode and size there are as many lines as the terminal has, none longer than it."""
    found = lines(Scene(View(engine="chat", mode=mode), large(), "/sock"), width, height)

    assert len(found) == height
    assert max(len(each) for each in found) <= width


@pytest.mark.parametrize("mode", [Mode.LANES, Mode.DESCRIBE])
@pytest.mark.parametrize(
    "hostile",
    ["\x1b[2J\x1b]0;owned\x07", "\x9b31m", "[bold red]x[/]", "\r\n\n", ":boom:", "\u202e"],
)
def test_nothing_an_engine_says_is_interpreted(mode: Mode, hostile: str) -> None:
    """Escapes, markup, emoji codes and line ends in every field change neither size nor terminal."""
    drawn = render(Scene(View(engine="chat", mode=mode), large(hostile), "/sock"), 160, 40)
    plain = SGR.sub("", drawn)

    assert plain.count("\n") == 40
    assert plain.replace("\n", "").isprintable()
    assert "[bold red]" in plain or "[bold red]" not in hostile
    assert ":boom:" in plain or ":boom:" not in hostile


@pytest.mark.parametrize(("age_s", "color"), [(10.0, ""), (40.0, "33"), (70.0, "31")])
def test_a_lane_is_coloured_over_half_of_its_limit(age_s: float, color: str) -> None:
    """Under half no colour, over half yellow, over all red; the percentage says it without colour."""
    lane = {"address": "w:0/m", "cls": "work", "phase": "step", "age_s": age_s, "limit_s": 60.0}
    engine = {"name": "chat", "state": "ready", "lanes": [lane]}
    seen = Picture(engine_rows([engine]), detail(engine))
    drawn = render(Scene(View(engine="chat"), seen, ""), 100, 20, color=True)
    line = next(each for each in drawn.split("\n") if "w:0/m" in each)

    assert set(re.findall(r"\x1b\[(3\d)m", line)) == ({color} if color else set())
    assert f"{age_s / 60:.0%}" in SGR.sub("", line)


@pytest.mark.parametrize("width", [40, 30, 24])
def test_age_and_limit_are_shown_where_the_terminal_is_narrow(width: int) -> None:
    """How long, of how much: that is what one looks for, and the other columns make room for it."""
    lane = {
        "address": "worker:0/ple-request", "cls": "work", "phase": "gather_embedding_rows",
        "age_s": 754.0, "limit_s": 5520.0, "details": {"step": 12},
    }  # fmt: skip
    engine = {
        "name": "a-name-of-some-length",
        "state": "unkillable",
        "age_s": 7260.0,
        "lanes": [lane],
    }
    seen = Picture(engine_rows([engine]), detail(engine))
    found = lines(Scene(View(engine="a-name-of-some-length"), seen, ""), width, 20)
    row = next(each for each in found if each.startswith("work"))

    assert found[1].split()[-1] == "AGE"
    assert found[2].split()[-1] == "2h1m"
    assert next(each for each in found if each.startswith("LANE")).split()[-2:] == ["AGE", "LIMIT"]
    assert row.split()[-2:] == ["12m34s", "1h32m"]


def test_an_old_picture_says_so() -> None:
    """When the daemon does not answer, the first line says how old the rest is and why."""
    scene = Scene(View(engine="chat"), large(), "/sock", stale_s=75.0, trouble="no daemon at /sock")

    assert lines(scene, 80, 24)[0].rstrip() == "1m15s old: no daemon at /sock"


def test_the_selected_engine_is_always_among_those_shown() -> None:
    """Of 100 engines the selected one stands on the screen, whichever it is."""
    seen = Picture(engine_rows([{"name": f"engine-{n:03}", "state": "ready"} for n in range(100)]))
    for n in (0, 1, 50, 98, 99):
        shown = lines(Scene(View(engine=f"engine-{n:03}"), seen, ""), 80, 24)
        assert any(each.startswith(f"> engine-{n:03}") for each in shown)


def test_a_large_engine_is_drawn_in_little_time() -> None:
    """64 processes of 4 lanes: from JSON to the terminal's bytes in less than a tenth of a second."""

    def once() -> float:
        begun = time.thread_time()  # CPU time of this thread: other load does not count
        render(Scene(View(engine="chat"), large(), "/sock"), 200, 60)
        return time.thread_time() - begun

    assert min(once() for _ in range(5)) < 0.1
