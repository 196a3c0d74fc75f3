"""Looks at the daemon in a thread of its own, so that a slow answer never holds up a key."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from stallwatch.cli.client import Client, segment
from stallwatch.cli.output import clean
from stallwatch.errors import StallwatchError, UnknownEngine
from stallwatch.top.rows import Detail, Picture, detail, engine_rows, stall_rows, words

_STALLS = 8


@dataclass(frozen=True, slots=True)
class News:
    """The last picture, when it was taken (monotonic seconds), and what is wrong since then."""

    picture: Picture
    taken: float
    trouble: str = ""


def look(daemon: Client, engine: str) -> Picture:
    """One look: all engines, the named one (or the first) with its lanes, the latest stalls."""
    engines = engine_rows(daemon.get("/v1/engines"))
    if engines and engine not in [each.name for each in engines]:
        engine = engines[0].name
    found = Detail()
    if engines:
        with contextlib.suppress(UnknownEngine):  # it has gone between the two questions
            found = detail(daemon.get(f"/v1/engines/{segment(engine)}"))
    return Picture(engines, found, stall_rows(daemon.get("/v1/stalls", limit=_STALLS)))


class Feed:
    """A thread that looks every `every_s` seconds and at once when another engine is wanted.

    `told` is called after each look; it must return at once.
    """

    def __init__(self, daemon: Client, first: Picture, *, every_s: float) -> None:
        self._daemon = daemon
        self._every_s = every_s
        self._news = News(first, time.monotonic())
        self._engine = ""
        self._restart = ""
        self._answer = ""
        self._wanted = threading.Condition()
        self._hurry = self._ended = False
        self._thread = threading.Thread(target=self._run, name="top-feed", daemon=True)
        self.told: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._thread.start()

    def news(self) -> News:
        with self._wanted:
            return self._news

    def answer(self) -> str:
        """What the daemon said to the last order, once."""
        with self._wanted:
            said, self._answer = self._answer, ""
            return said

    def want(self, engine: str) -> None:
        with self._wanted:
            if engine != self._engine:
                self._engine, self._hurry = engine, True
                self._wanted.notify()

    def restart(self, engine: str) -> None:
        with self._wanted:
            self._restart, self._hurry = engine, True
            self._wanted.notify()

    def end(self) -> None:
        """The thread ends after the question it is at; as a daemon thread it holds up no exit."""
        with self._wanted:
            self._ended = self._hurry = True
            self._wanted.notify()

    def _run(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._hurry, self._every_s)
                if self._ended:
                    return
                self._hurry = False
                engine, order, self._restart = self._engine, self._restart, ""
            said = self._obey(order) if order else ""
            news = self._look(engine)
            with self._wanted:
                self._news, self._answer = news, said or self._answer
                if not self._ended:  # what `told` writes to may be closed by now
                    self.told()

    def _look(self, engine: str) -> News:
        try:
            return News(look(self._daemon, engine), time.monotonic())
        except StallwatchError as exc:
            return self._old(exc.message)
        except Exception as exc:
            # Whatever sits behind the URL: the view stays and says so.
            self._daemon.close()
            return self._old(f"the answer cannot be read: {type(exc).__name__}: {exc}")

    def _old(self, trouble: str) -> News:
        return News(self._news.picture, self._news.taken, clean(trouble))

    def _obey(self, engine: str) -> str:
        try:
            said = self._daemon.post(f"/v1/engines/{segment(engine)}:restart")
        except StallwatchError as exc:
            return clean(exc)
        except Exception as exc:
            self._daemon.close()
            return clean(f"the answer cannot be read: {type(exc).__name__}: {exc}")
        return words(said.get("message")) if isinstance(said, dict) else ""


def ring(fd: int) -> Callable[[], None]:
    """A `told` that makes the non-blocking pipe readable; a full one is readable already."""

    def told() -> None:
        with contextlib.suppress(OSError):
            os.write(fd, b"\0")

    return told
