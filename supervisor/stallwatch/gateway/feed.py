"""The conversation with the supervisor: its events and views in, counts and silences out.

Failures come over the control socket's event stream: the daemon pushes them the moment it declares
them, which is sooner than any poll of the board would see them, and it works for a gateway in a
container of its own that sees no /dev/shm of the engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from stallwatch.gateway.errors import Failure
from stallwatch.gateway.gateway import Gateway
from stallwatch.gateway.replica import LEAVING, View
from stallwatch.gateway.watch import FLOWING_S, Watch

EVERY_S = 1.0
SILENT_EVERY_S = 0.2
ANSWER_S = 2.0
LOST_S = 1.5  # without an answer for so long there is no supervisor
AGAIN_S = 0.2
MOST_ENGINES = 256  # in one report
MOST_WHY = 200
COUNTED_S = 0.05  # after a FAILURE: its answers are counted by then, and told at once
_TELLING = ("fail", "restart")
_MAX_LINE = 1 << 20


class Feed:
    """`run` lives as long as the gateway; whatever breaks in it is tried again."""

    def __init__(
        self, gateway: Gateway, watch: Watch, *, url: str, socket: str, token: str
    ) -> None:
        self._gateway = gateway
        self._watch = watch
        self._base = url.rstrip("/") if url else "http://localhost"
        self._socket = socket
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._last_event: int | None = None
        self._answered_s = time.monotonic()
        self._look = asyncio.Event()
        self._source = f"{os.getpid()}-{secrets.token_hex(8)}"

    async def run(self) -> None:
        """Until cancelled."""
        connector = aiohttp.UnixConnector(self._socket) if self._socket else None
        async with (
            aiohttp.ClientSession(
                self._base,
                connector=connector,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
                read_bufsize=_MAX_LINE,
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._for_ever(session, self._follow))
            group.create_task(self._for_ever(session, self._views))
            group.create_task(self._for_ever(session, self._report))

    async def _for_ever(self, session: aiohttp.ClientSession, work: Any) -> None:
        while True:
            try:
                await work(session)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
                pass  # no supervisor, or one that is going: `_views` decides when to say so
            self._is_lost()
            await asyncio.sleep(AGAIN_S)

    def _is_lost(self) -> None:
        if self._gateway.router.supervised and time.monotonic() - self._answered_s > LOST_S:
            self._gateway.router.orphaned()

    # -- in ------------------------------------------------------------------------------------

    async def _views(self, session: aiohttp.ClientSession) -> None:
        """The engines, once a second and whenever something happened."""
        while True:
            self._look.clear()
            async with session.get("/v1/engines") as response:
                response.raise_for_status()
                engines = (await response.json())["items"]
            self._answered_s = time.monotonic()
            self._gateway.router.learn(self._chosen(engines))
            if any(r.view.state in LEAVING for r in self._gateway.router.replicas.values()):
                self._watch.changed.set()  # a stop waits for the count of what runs there
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._look.wait()
            except TimeoutError:
                pass

    def _chosen(self, engines: list[dict[str, Any]]) -> Mapping[str, tuple[str, View]]:
        options = self._gateway.options
        found: dict[str, tuple[str, View]] = {}
        for engine in engines:
            name = str(engine["name"])
            if options.engines and name not in options.engines:
                continue
            port = engine.get("port")
            address = options.upstreams.get(name) or (f"127.0.0.1:{port}" if port else "")
            if not address or engine.get("role") == "gateway":
                continue
            found[name] = (
                address,
                View(
                    state=str(engine["state"]),
                    ready=bool(engine["ready"]),
                    incarnation=int(engine["incarnation"]),
                    enforce=str(engine.get("enforce", "restart")),
                    backoff_s=float(engine.get("backoff_s") or 0.0),
                    why=str(engine.get("exhausted_reason") or "")[:MOST_WHY],
                    comes_back=bool(engine.get("comes_back", True)),  # an older daemon does not say
                ),
            )
        return found

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        """Events as they happen. What happened before the gateway came is not for its clients."""
        if self._last_event is None:
            self._last_event = await self._newest(session)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=40.0)
        async with session.get(
            "/v1/events", params={"after": str(self._last_event)}, timeout=timeout
        ) as response:
            response.raise_for_status()
            self._look.set()
            async for event in _events(response):
                self._last_event = int(event["id"])
                self._heard(event)
        self._look.set()

    async def _newest(self, session: aiohttp.ClientSession) -> int:
        last = 0
        while True:
            params = {"follow": "false", "after": str(last)}
            async with session.get("/v1/events", params=params) as response:
                response.raise_for_status()
                page = await response.json()
            if not page["items"]:
                return last
            last = int(page["last"])

    def _heard(self, event: Mapping[str, Any]) -> None:
        data = event.get("data") or {}
        if event.get("type") == "stall" and data.get("action") in _TELLING:
            name, id_, kind = str(event["engine"]), str(data["stall"]), str(data["kind"])
            words = f"engine {name} failed: {event.get('message', kind)} [{id_}]"
            self._gateway.router.fail(name, Failure(id_, kind, words, int(data["incarnation"])))
            # The report says how many clients were answered, and is being written.
            asyncio.get_running_loop().call_later(COUNTED_S, self._watch.changed.set)
        self._look.set()

    # -- out -----------------------------------------------------------------------------------

    async def _report(self, session: aiohttp.ClientSession) -> None:
        """Counts once a second; while an engine is silent, and when that ends, more often."""
        while True:
            self._watch.changed.clear()
            async with session.post("/v1/gateway", json=self._said()) as response:
                response.raise_for_status()
                self._watch.told([str(name) for name in (await response.json()).get("serving", ())])
            pause = SILENT_EVERY_S if self._watch.silent else EVERY_S
            await asyncio.sleep(0.05)
            try:
                async with asyncio.timeout(pause):
                    await self._watch.changed.wait()
            except TimeoutError:
                pass

    def _said(self) -> dict[str, Any]:
        gateway = self._gateway
        replicas = gateway.router.replicas.values()
        # The busiest first: a report names no more than so many, and one that is not named is idle.
        busy = sorted(replicas, key=lambda r: len(r.exchanges), reverse=True)[:MOST_ENGINES]
        now = time.monotonic()
        return {
            "source": self._source,
            "now_ns": time.monotonic_ns(),
            "in_flight": gateway.in_flight,
            "waiting": gateway.router.waiting,
            "connections": len(gateway.clients),
            "replicas": {r.name: len(r.exchanges) for r in busy},
            "bytes_ns": {
                r.name: int(r.pool.last_s * 1e9) for r in busy if now - r.pool.last_s < FLOWING_S
            },
            "lost": dict(gateway.lost.most_common(MOST_ENGINES)),
            "totals": dict(gateway.totals),
            "repeats": dict(gateway.repeats),
            "failures": dict(gateway.by_failure),
            "silent": [silence.as_dict() for silence in self._watch.silent],
        }


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data:"):
            yield json.loads(line[5:])
