"""The gateway as a process: listen, beat, watch, follow the supervisor, end on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from stallwatch import heartbeat, sdnotify
from stallwatch.config.base import split_address
from stallwatch.errors import ConfigError
from stallwatch.gateway.feed import Feed
from stallwatch.gateway.gateway import Gateway
from stallwatch.gateway.options import Options
from stallwatch.gateway.watch import TICK_S, Watch

BACKLOG = 2048
LATE = "loop"  # the lane and the phase of the event loop


def run(options: Options, *, url: str = "", control: str = "", token: str = "") -> int:
    """Serve until SIGTERM or SIGINT. Raises ConfigError when the address cannot be had."""
    # Before the port: a gateway that listens and is not attached would pass for one without a lane.
    heartbeat.attach(role="gateway")
    sock = bind(options.listen)
    _many_files()
    try:
        factory = loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_main(options, sock, url=url, control=control, token=token))
    finally:
        sock.close()
        if options.listen.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(options.listen.removeprefix("unix:"))


def _many_files() -> None:
    """Two descriptors for each request: the soft limit of 1,024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop if it is installed: the relay's cost is that of its event loop."""
    if os.environ.get("STALLWATCH_GATEWAY_LOOP") == "asyncio":
        return None
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def bind(address: str) -> socket.socket:
    """A listening socket for 'HOST:PORT' or 'unix:PATH'. Raises ConfigError."""
    sock: socket.socket | None = None
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _clear(path)
            os.fchmod(sock.fileno(), 0o600)  # the file gets the mode of the socket's inode
            sock.bind(path)
        else:
            host, port = split_address(address)
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, proto, _, where = found[0]
            sock = socket.socket(family, kind, proto)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
        sock.listen(BACKLOG)
    except (OSError, ValueError) as error:
        if sock is not None:
            sock.close()
        raise ConfigError(
            f"the gateway cannot listen at {address!r}: {error}",
            hint="stop who holds it, or choose another address with --listen",
        ) from None
    sock.setblocking(False)
    return sock


def _clear(path: str) -> None:
    """Remove the socket of a gateway that was killed. Raises OSError while one listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError("somebody listens there already")


async def _main(
    options: Options, sock: socket.socket, *, url: str, control: str, token: str
) -> int:
    loop = asyncio.get_running_loop()
    gateway = Gateway(options)
    watch = Watch(gateway)
    asked = asyncio.Event()

    def ask() -> None:
        if asked.is_set():
            gateway.hurry()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    server = await _serve(loop, gateway, sock)
    feed = asyncio.ensure_future(Feed(gateway, watch, url=url, socket=control, token=token).run())
    beat = asyncio.ensure_future(_beat(gateway, watch))
    stop = asyncio.ensure_future(asked.wait())
    done, _ = await asyncio.wait({feed, beat, stop}, return_when=asyncio.FIRST_COMPLETED)
    server.close()
    await gateway.leave(options.drain)
    for task in (feed, beat, stop):
        task.cancel()
    results = await asyncio.gather(feed, beat, stop, return_exceptions=True)
    for task, result in zip((feed, beat), results, strict=False):
        if task in done and isinstance(result, BaseException):
            raise result
    return 0


async def _serve(
    loop: asyncio.AbstractEventLoop, gateway: Gateway, sock: socket.socket
) -> asyncio.Server:
    if sock.family == socket.AF_UNIX:
        server: Any = await loop.create_unix_server(gateway.connection, sock=sock, backlog=BACKLOG)
    else:
        server = await loop.create_server(gateway.connection, sock=sock, backlog=BACKLOG)
    assert isinstance(server, asyncio.AbstractServer)
    return server  # type: ignore[return-value]  # uvloop has a class of its own


async def _beat(gateway: Gateway, watch: Watch) -> None:
    """The loop's lane: it turns, so it lives. A blocked loop is found like any stalled engine."""
    board = heartbeat.attach(role="gateway")
    lane = board.lane(LATE)
    mark = lane.marker(LATE, "requests", "connections")
    notify = sdnotify.Notifier()
    board.ready()
    notify.ready("serving")
    fed_s = 0.0
    while True:
        mark(gateway.in_flight, len(gateway.clients))
        lane.progress(1)
        board.pending(gateway.in_flight)
        watch.turn()
        now = time.monotonic()
        if notify.watchdog_s and now - fed_s >= notify.watchdog_s:
            fed_s = now
            notify.watchdog()
        await asyncio.sleep(TICK_S)
