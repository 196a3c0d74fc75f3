"""Jobs of one engine: what is ordered is done, once, also when the host is short of threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from stallwatch.daemon.orders import Orders


class Speaker:
    """As much of a runner as a job needs: it collects what goes wrong."""

    name = "chat"
    parts = None

    def __init__(self) -> None:
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(text)


def test_a_job_without_a_thread_is_done_when_there_is_one_again(monkeypatch):
    """pids.max is reached for a moment: the kill that was ordered then is not forgotten."""
    speaker = Speaker()
    orders = Orders(speaker)  # type: ignore[arg-type]
    done = threading.Event()

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", no_thread)
        orders.job("kill", done.set)
        orders.retry()
    assert not done.is_set()
    assert all("'kill' waits for a thread" in text for text in speaker.problems)
    orders.retry()
    assert done.wait(5)


def test_only_the_first_end_of_an_incarnation_begins():
    """A kill and a stop at the same moment: one of them ends the tree, from whatever thread."""
    orders = Orders(Speaker())  # type: ignore[arg-type]
    known = SimpleNamespace()
    gate = threading.Barrier(8)
    begun: list[bool] = []

    def begin() -> None:
        gate.wait(5)
        begun.append(orders._begins_end(known))  # type: ignore[arg-type]

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(begun) == [False] * 7 + [True]
    assert orders._begins_end(SimpleNamespace())  # type: ignore[arg-type]
