"""The live part of the pages: cells of text as server-sent events, computed once for all who look."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.types import Send

from stallwatch.control import page_words as words
from stallwatch.control.page_views import LANES_AT_ONCE
from stallwatch.control.service import EngineView, Service
from stallwatch.control.stream import Client, EventStream, Hub, _send
from stallwatch.control.views import dumps

TICK_S = 1.0
LATEST = 10
_FRESH_S = 0.2  # how long one computed frame serves everybody


class Frames:
    """What a page shows now, as one SSE frame. Safe from any thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, bytes]] = {}  # by engine: as many as there are

    def frame(self, name: str) -> bytes:
        """Of one engine, or of all with name ''. Unknown name: UnknownEngine."""
        with self._lock:
            at, kept = self._kept.get(name, (0.0, b""))
            if not kept or time.monotonic() - at > _FRESH_S:
                kept = f"event: now\ndata: {dumps(self._now(name))}\n\n".encode()
                self._kept[name] = time.monotonic(), kept
            return kept

    def _now(self, name: str) -> dict[str, Any]:
        if name:
            return {"engines": [_engine(self._service.engine(name), most=0)]}
        views = [self._service.engine(each.name) for each in self._service.engines()]
        stalls = self._service.stalls(limit=LATEST)
        return {
            "engines": [_engine(view, most=LANES_AT_ONCE) for view in views],
            "stalls": [words.stall_cells(each) for each in stalls],
        }


def _engine(view: EngineView, *, most: int) -> dict[str, Any]:
    lanes = words.nearest(view.lanes, most) if most else view.lanes
    return {
        "name": view.name,
        "level": words.level(view.state),
        "cells": words.engine_cells(view),
        "lanes": [words.lane_cells(lane) for lane in lanes],
        "used": [round(min(words.used(lane), 1.0), 2) for lane in lanes],
        "processes": [words.process_cells(each) for each in view.processes] if not most else [],
    }


class LiveStream(EventStream):
    """A frame a second, and at once when something happened."""

    def __init__(self, hub: Hub, service: Service, frames: Frames, name: str) -> None:
        super().__init__(hub, service, after=0, engine=None)
        self._frames, self._name = frames, name

    async def _follow(self, client: Client, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await _send(send, b"retry: 2000\n\n")
        while True:
            await _send(send, await run_in_threadpool(self._frames.frame, self._name))
            if await _ended(client):
                return


async def _ended(client: Client) -> bool:
    """Waits for a tick or for events; True when the stream is over."""
    try:
        async with asyncio.timeout(TICK_S):
            first = await client.queue.get()
    except TimeoutError:
        return False
    if first is None:
        return True
    await asyncio.sleep(_FRESH_S)  # what belongs together comes together
    while not client.queue.empty():
        if client.queue.get_nowait() is None:
            return True
    return False
