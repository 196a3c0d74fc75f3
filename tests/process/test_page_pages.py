"""The operator's pages over real sockets: who may read them, their stream, and how long they take."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from control_helpers import STALL, Running, serving
from stallwatch.clock import SystemClock
from stallwatch.control import stream
from stallwatch.control.service import LaneView, ProcessView
from stallwatch.evidence.ledger import Ledger
from stallwatch.testing.service import FakeService, engine_view, stall_report

pytestmark = [pytest.mark.http, pytest.mark.process]

PATHS = (
    "/",
    "/engines/chat",
    "/stalls",
    f"/stalls/{STALL}",
    f"/stalls/{STALL}.txt",
    "/static/page.js",
)


@pytest.fixture
def running(tmp_path):
    service = FakeService()
    service.reports[STALL] = stall_report(STALL)
    with serving(tmp_path, service) as found:
        yield found


@pytest.mark.parametrize("path", PATHS)
def test_every_page_runs_no_foreign_script(running: Running, path):
    """Each page answers, and what it may load is our own two files and nothing inline."""
    found = running.ask(path, via="tcp")
    policy = found.headers["content-security-policy"]

    assert found.status == 200
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    "path",
    [
        "/engines/nope", "/engines/%3Cb%3E", "/stalls/st-1", f"/stalls/{STALL[:-1]}0",
        "/stalls?page=0", "/stalls?page=x", "/stalls?engine=..", "/live?engine=nope",
        "/static/page.py", "/static/..%2fpage.py", "/stalls/..%2f..%2fetc%2fpasswd",
    ],
)  # fmt: skip
def test_what_is_not_there_is_a_problem_document(running: Running, path):
    """Wrong names, numbers and paths are refused with a hint, never with an error of ours."""
    found = running.ask(path, via="tcp")

    assert found.status in (404, 422)
    assert found.json["hint"]


def test_pages_are_no_place_to_post(running: Running):
    """No page changes anything: other methods are refused even with every right."""
    for path in PATHS:
        assert running.ask(path, method="POST").status == 405


def test_stalls_are_paged(running: Running):
    """120 stalls are three pages, newest first, each stall on exactly one of them."""
    for number in range(1, 120):
        ident = f"st-20261130T031502Z-{number:08x}"
        running.service.reports[ident] = stall_report(ident)
    pages = [running.ask(f"/stalls?page={n}", via="tcp").text for n in (1, 2, 3)]
    shown = [
        [i for i in running.service.reports if f'href="/stalls/{i}"' in page] for page in pages
    ]

    assert [len(each) for each in shown] == [50, 50, 20]
    assert sorted(i for each in shown for i in each) == sorted(running.service.reports)
    assert ['rel="next"' in page for page in pages] == [True, True, False]
    assert ['rel="prev"' in page for page in pages] == [False, True, True]


def frames(sock, path):
    """The data of each frame of a live stream, as they come."""
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    with sock.makefile("rb") as lines:
        assert lines.readline().startswith(b"HTTP/1.1 200")
        for line in lines:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def test_the_stream_says_what_happens_within_a_second(running: Running):
    """A change of state reaches an open stream at once, not at its next tick alone."""
    with contextlib.closing(running.tcp()) as sock:
        live = frames(sock, "/live?engine=chat")
        assert next(live)["engines"][0]["cells"][1] == "ready"
        view = running.service.views["chat"]
        running.service.set(replace(view, reason="because"))
        running.service.emit("state", "because")
        until = time.monotonic() + 5.0
        while "because" not in next(live)["engines"][0]["cells"]:
            assert time.monotonic() < until


def test_streams_are_bounded_and_end_with_the_server(tmp_path, monkeypatch):
    """More lookers than places get 503, and an open stream does not hold the server's end up."""
    monkeypatch.setattr(stream, "CLIENTS", 2)
    with contextlib.ExitStack() as stack, serving(tmp_path) as running:
        for _ in range(2):
            sock = stack.enter_context(contextlib.closing(running.tcp()))
            next(frames(sock, "/live"))
        assert running.ask("/live", via="tcp").status == 503
        began = time.monotonic()
    assert time.monotonic() - began < 5.0


class Large(FakeService):
    """64 processes x 4 lanes that move at every look, and 1,000 large stalls in a real ledger."""

    def __init__(self, folder) -> None:
        super().__init__()
        self.ledger = Ledger(folder, max_items=1000, max_bytes=1 << 30, clock=SystemClock())
        tree = {"frame": "", "children": [{"frame": "f" * 60, "threads": 1, "ends": 1}] * 400}
        self.ident = ""
        for number in range(1000):
            self.ident = f"st-20261130T031502Z-{number:08x}"
            self.ledger.insert({**stall_report(self.ident), "stack_tree": tree})

    def engine(self, name):
        beat = int(time.monotonic() * 10)
        lanes = tuple(
            LaneView(
                f"worker:{p}/stream/{n}", "work", "execute_model", beat % 7 / 10, 60.0, beat, beat,
                p, p, details=(("step", beat),),
            )
            for p in range(64)
            for n in range(4)
        )  # fmt: skip
        processes = tuple(
            ProcessView(f"worker:{p}", p, "S", ready=True, pending=1, attached=True)
            for p in range(64)
        )
        return engine_view("chat", lanes=lanes, processes=processes)

    def stalls(self, *, limit=100, engine=None, offset=0):
        return self.ledger.summaries(limit, engine, offset=offset)

    def stall(self, stall_id):
        return self.ledger.get(stall_id) or super().stall(stall_id)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_pages_answer_in_bounded_time_with_much_to_show(tmp_path):
    """256 moving lanes, 1,000 stalls and eight open streams: every page within two seconds.

    The slowest of five answers of each page counts; the last page of stalls is as far as the first.
    """
    service = Large(tmp_path / "state")
    with (
        contextlib.closing(service.ledger),
        contextlib.ExitStack() as stack,
        serving(tmp_path, service) as running,
        ThreadPoolExecutor(8) as pool,
    ):
        streams = []
        for _ in range(8):
            sock = stack.enter_context(contextlib.closing(running.tcp()))
            streams.append(frames(sock, "/live?engine=chat"))
        assert all(len(next(s)["engines"][0]["lanes"]) == 256 for s in streams)
        enough = threading.Event()
        gaps = [pool.submit(_longest_gap, live, enough) for live in streams]
        slowest = {}
        paths = ("/", "/engines/chat", "/stalls", "/stalls?page=20", f"/stalls/{service.ident}")
        for path in paths:
            for _ in range(5):
                began = time.monotonic()
                assert running.ask(path, via="tcp").status == 200
                slowest[path] = max(slowest.get(path, 0.0), time.monotonic() - began)
        enough.set()
        longest = max(gap.result(30) for gap in gaps)

    assert max(slowest.values()) < 2.0, slowest
    assert longest < 3.0  # a tick a second


def _longest_gap(live, enough):
    """Between two frames, over at least two of them and until it is enough."""
    last, longest, seen = time.monotonic(), 0.0, 0
    while not (enough.is_set() and seen >= 2):
        next(live)
        seen += 1
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest
