"""The HTTP servers: one thread, one loop, up to three listeners, no signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from stallwatch import paths
from stallwatch.control import probes
from stallwatch.control.app import create_app
from stallwatch.control.auth import Auth, split_address
from stallwatch.control.gateway import Desk, GatewayCollector
from stallwatch.control.health import create_health_app
from stallwatch.control.metrics import Metrics
from stallwatch.control.protocol import HealthProtocol, Protocol
from stallwatch.control.service import Service
from stallwatch.control.stream import Hub
from stallwatch.errors import ConfigError, StallwatchError

THREADS = 16
_MAX_SOCKET_PATH = 107  # sun_path
_BACKLOG = 128
_TICK_S = 0.5


class _Server(uvicorn.Server):
    """Never touches signals: they belong to the daemon's main thread."""

    woken: asyncio.Event | None = None

    def end(self) -> None:
        """Ask the loop to end, now. From the loop's own thread."""
        self.should_exit = True
        if self.woken is not None:
            self.woken.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Uvicorn wakes ten times a second to look at its flag, which costs more than our probes.

        on_tick(0) also renews the Date header, so twice a second is what its clock needs.
        """
        self.woken = asyncio.Event()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.woken.wait()


def _uvicorn(app: FastAPI, protocol: type[Protocol]) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # X-Forwarded-For would let a peer choose its own address
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=16 * 1024,
        )
    )


def bind_tcp(address: str, *, key: str = "control") -> socket.socket:
    """A listening socket, or ConfigError that names who holds the port."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise ConfigError(f"{key} = {address!r}: no such address ({exc})") from None
    family, kind, proto, _, where = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{key} = {address!r}: the port is held by {_holder(port)}",
                hint=f"stop that process, or choose another address with --{key.replace('_', '-')}",
            ) from None
        raise ConfigError(f"{key} = {address!r}: {exc.strerror}") from None
    sock.setblocking(False)
    return sock


def _holder(port: int) -> str:
    import psutil  # noqa: PLC0415  (only when something is wrong)

    with contextlib.suppress(psutil.Error, OSError):
        for row in psutil.net_connections("tcp"):
            if (
                row.status == psutil.CONN_LISTEN
                and row.laddr
                and row.laddr.port == port
                and row.pid
            ):
                with contextlib.suppress(psutil.Error):
                    return f"pid {row.pid} ({psutil.Process(row.pid).name()})"
                return f"pid {row.pid}"
    return f"somebody else (`ss -ltnp 'sport = :{port}'` names them)"


def bind_unix(path: str) -> socket.socket:
    """A listening socket at `path`, 0600 from its first moment.

    A default place is made (0700); any other folder must exist: made in a mistyped place, the
    socket would be where no client looks. Raises ConfigError.
    """
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"the control socket's path is longer than {_MAX_SOCKET_PATH} bytes: {path}",
            hint="set STALLWATCH_SOCKET to a shorter path",
        )
    folder = os.path.dirname(path) or "."
    default = paths.client_sockets({**os.environ, "STALLWATCH_SOCKET": ""})
    if path not in default and not os.path.isdir(folder):
        raise ConfigError(
            f"the control socket cannot be made at {path}: {folder} is no folder",
            hint="make the folder first, or leave the socket at its default place",
        )
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _clear_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Linux gives the file the mode of the socket's inode: no moment at 0777, no umask race.
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(path)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as exc:
        raise ConfigError(
            f"the control socket cannot be made at {path}: {exc.strerror}",
            hint="set STALLWATCH_SOCKET or --state-dir to a place that this user may write",
        ) from None
    sock.setblocking(False)
    return sock


def _clear_stale(path: str) -> None:
    """Remove a socket that a killed daemon left; ConfigError when one still answers there."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is no socket", hint="move it out of the way")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass  # a full backlog: somebody is there
    raise ConfigError(
        f"another stallwatch listens at {path}",
        hint="stop it (`stallwatch status` shows it), or give this one another --state-dir",
    )


class ControlServer:
    """Control over TCP and the unix socket, health over its own address; each is optional.

    Constructing binds (ConfigError when an address cannot be had); start() serves in a thread;
    stop() ends within its deadline and leaves no thread and no socket file.
    """

    def __init__(
        self,
        service: Service,
        *,
        control: str | None = None,
        socket_path: str | None = None,
        health_listen: str | None = None,
        auth: Auth | None = None,
        desk: Desk | None = None,
    ) -> None:
        auth = auth or Auth.for_address(control or "127.0.0.1:0")
        metrics = Metrics(service)
        if desk is not None:
            metrics.registry.register(GatewayCollector(desk))
        self._hub = Hub(service)
        self._cache = probes.Cache(service)
        app = create_app(
            service,
            auth,
            metrics=metrics,
            hub=self._hub,
            cache=self._cache,
            socket_path=os.path.abspath(socket_path) if socket_path else "",
            desk=desk,
        )
        health = create_health_app(service, metrics=metrics, cache=self._cache)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()
        self._error: BaseException | None = None
        self._socket_path = socket_path
        self._socket_inode: tuple[int, int] | None = None
        self._listeners: list[tuple[_Server, socket.socket]] = []
        self.control_address = self.health_address = ""
        try:
            if control:
                self.control_address = self._listen(app, bind_tcp(control))
            if health_listen:
                bound = bind_tcp(health_listen, key="health_listen")
                self.health_address = self._listen(health, bound, HealthProtocol)
            if socket_path:
                self._listen(app, bind_unix(socket_path))
                found = os.lstat(socket_path)
                self._socket_inode = (found.st_dev, found.st_ino)
        except BaseException:
            self._close_sockets()
            raise

    def _listen(
        self, app: FastAPI, sock: socket.socket, protocol: type[Protocol] = Protocol
    ) -> str:
        self._listeners.append((_uvicorn(app, protocol), sock))
        name = sock.getsockname()
        if not isinstance(name, tuple):
            return str(name)
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    def start(self, timeout: float = 10.0) -> None:
        """Serve. Returns once every listener answers; StallwatchError when that fails."""
        self._thread = threading.Thread(target=self._run, name="stallwatch-control", daemon=True)
        self._thread.start()
        if not self._up.wait(timeout) or self._error is not None:
            self.stop(1.0)
            raise StallwatchError(
                f"the control server did not start: {self._error or 'no answer in time'}",
                hint="this is a bug or a machine without memory; the log has the traceback",
            )

    def stop(self, timeout: float = 5.0) -> bool:
        """End every connection and the thread. False when the thread outlived the deadline."""
        thread, loop = self._thread, self._loop
        if thread is not None and loop is not None and thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ask_to_end)
            thread.join(timeout)
        self._hub.join_thread(min(timeout, 2.0))
        self._close_sockets()
        return thread is None or not thread.is_alive()

    def _ask_to_end(self) -> None:
        self._hub.close()
        for server, _ in self._listeners:
            server.end()

    def _close_sockets(self) -> None:
        for _, sock in self._listeners:
            sock.close()
        if self._socket_path and self._socket_inode:
            with contextlib.suppress(OSError):
                found = os.lstat(self._socket_path)
                if (found.st_dev, found.st_ino) == self._socket_inode:  # ours, not a successor's
                    os.unlink(self._socket_path)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:
            self._error = exc
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        _bound_threads()
        await self._cache.look()
        jobs = [
            asyncio.ensure_future(server.serve(sockets=[sock])) for server, sock in self._listeners
        ]
        try:
            while not all(server.started for server, _ in self._listeners):
                if any(job.done() for job in jobs):
                    break
                await asyncio.sleep(0.005)
            self._up.set()
            await asyncio.gather(*jobs)
        finally:
            self._ask_to_end()


def _bound_threads() -> None:
    import anyio.to_thread  # noqa: PLC0415  (its limiter exists per loop, not per import)

    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
