"""What a hostile engine writes, in a real Chromium: it is text, and the picture of waits is drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_helpers import STALL, serving
from stallwatch.control.service import LaneView
from stallwatch.testing.service import FakeService, engine_view, stall_report

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

EVIL = "<img src=x onerror=window.owned=1><script>window.owned=1</script>\x1b[31m\u202edrow"
EDGES = [
    {"waiter": "api:0/loop", "target": "core:0/engine", "why": "waits in get_output"},
    {"waiter": "core:0/engine", "target": "worker:0/model", "why": "waits for step_result"},
    {"waiter": "worker:0/model", "target": "worker:1/model", "why": EVIL},
    {"waiter": "worker:1/model", "target": "worker:0/model", "why": "all_reduce"},
]


@pytest.fixture
def running(tmp_path):
    lane = LaneView(
        EVIL, "work", EVIL, 45.0, 60.0, 1, 1, 7, 7, wait_on=EVIL, text=EVIL, details=((EVIL, 1),)
    )
    service = FakeService([engine_view(lanes=(lane,), reason=EVIL, command=(EVIL,))])
    report = stall_report(STALL, kind="ORDER_CYCLE")
    frames = {"frame": EVIL, "members": ["worker:0-1"], "threads": 2, "ends": 2, "children": []}
    report |= {
        "summary": EVIL,
        "wait_graph": {"edges": EDGES, "reasons": []},
        "stack_tree": {"frame": "", "children": [frames]},
        "timeline": [{"at_s": 0.0, "text": EVIL}],
    }
    service.reports[STALL] = report
    with serving(tmp_path, service) as found:
        yield found


@pytest.mark.parametrize("path", ["/", "/engines/chat", "/stalls", f"/stalls/{STALL}"])
def test_nothing_of_it_runs_or_becomes_an_element(page, running, path):
    """No image, no script of its own, no refused attempt on the console; the words are there."""
    page.look()
    page.console.clear()
    page.go(f"http://{running.server.control_address}{path}")
    if path in ("/", "/engines/chat"):  # and what comes later, by the stream
        page.until("document.getElementById('live').textContent === 'live'")
        view = running.service.views["chat"]
        running.service.set(replace(view, reason=f"later {EVIL}"))
        running.service.emit("state", EVIL)
        page.until("document.body.innerText.includes('later <img')")

    assert page.js("window.owned") is None
    assert page.js("document.querySelectorAll('img').length") == 0
    assert page.js("document.scripts.length") == 1
    assert page.js("/[\\u001b\\u202e]/.test(document.documentElement.outerHTML)") is False
    assert page.console == []


def test_the_policy_refuses_markup_from_strings(page, running):
    """Even a script of the page itself could not turn a string into elements."""
    page.look()
    page.go(f"http://{running.server.control_address}/")

    refused = page.js(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return ''; }"
        " catch (e) { return e.name; } })()"
    )
    assert refused == "TypeError"
    page.console.clear()  # the refusal just asked for


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_picture_of_waits_is_drawn_left_to_right(page, running, shots, dark):
    """Four boxes, four arrows; a waiter stands left of its target, the culprit has the thick border."""
    page.look(dark=dark)
    page.go(f"http://{running.server.control_address}/stalls/{STALL}")
    page.screenshot(shots / f"graph-{'dark' if dark else 'light'}.png")
    left = page.js(
        "Object.fromEntries(Array.from(document.querySelectorAll('svg g'),"
        " (g) => [g.querySelector('text').textContent, g.querySelector('rect').x.baseVal.value]))"
    )

    assert left["api:0/loop"] < left["core:0/engine"] < left["worker:0/model"]
    assert page.js("document.querySelectorAll('svg .edge').length") == 4
    assert page.js("document.querySelector('svg .culprit text').textContent") == "worker:0/model"
    wide = "getComputedStyle(document.querySelector('svg .culprit rect')).strokeWidth"
    assert page.js(wide) == "3px"
