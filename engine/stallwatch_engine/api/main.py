"""The api process: `python -m stallwatch_engine.api.main --model DIR --worker-fd N --port P`.

Whoever starts it hands down one end of a socket pair whose other end the worker has, and keeps
neither open itself: that is how a worker's death is noticed. `--worker-pid` adds the pidfd, for a
worker whose children may hold its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from stallwatch_engine.api.app import create_app
from stallwatch_engine.api.client import EngineClient, Limits
from stallwatch_engine.api.connection import Connection, many_files
from stallwatch_engine.api.heart import Heart
from stallwatch_engine.api.metrics import Metrics
from stallwatch_engine.api.prepare import CannotStart, Prepared, parse_options, prepare

DEATH_GRACE_S = 0.5  # the supervisor confirms an exit in 250 ms
EXIT_CONFIG = 2

_log = logging.getLogger("stallwatch.engine")


class _OwnAborts(logging.Filter):
    """A stream that ended in an error is left unfinished on purpose: no news for the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "ASGI callable returned without completing response."


class ApiServer(uvicorn.Server):
    """uvicorn, with its signals handled by this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiProcess:
    """What one api process is made of."""

    def __init__(self, prepared: Prepared, worker: socket.socket, worker_pid: int | None) -> None:
        self._options = options = prepared.options
        self._board = prepared.board
        self._listener = prepared.listener
        self._worker = worker
        self._worker_pid = worker_pid
        grace = DEATH_GRACE_S if self._board.attached else 0.0
        limits = Limits(options.queue, options.timeout, grace)
        self._client = EngineClient(prepared.codec, limits, Metrics())
        name = options.served_name or os.path.basename(os.path.normpath(options.model))
        self._server = ApiServer(
            uvicorn.Config(
                create_app(self._client, name),
                http=Connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=max(1, int(options.drain) + 2),
            )
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then let what is being answered finish."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        heart = Heart(self._board, self._client)
        await self._client.connect(self._worker)
        heart.start()
        try:
            with self._watch_worker():
                await self._server.serve(sockets=[self._listener])
        finally:
            await heart.stop()
            self._client.close()

    def _stop(self) -> None:
        """Listen no more, finish what was begun, and after the drain time end the rest."""
        self._client.drain()
        asyncio.get_running_loop().call_later(self._options.drain, self._client.shut_down)
        self._server.should_exit = True

    @contextlib.contextmanager
    def _watch_worker(self) -> Iterator[None]:
        pid = self._worker_pid
        if pid is None:
            yield
            return
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            self._client.worker_died(f"process {pid}: {error.strerror}")
            yield
            return

        def ended() -> None:
            loop.remove_reader(pidfd)
            # What it sent before its end is still in the socket: read that first.
            loop.call_later(0.05, self._client.worker_died, f"process {pid} ended")

        loop.add_reader(pidfd, ended)
        try:
            yield
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 stopped as asked, 2 the command line, checkpoint or port is to be corrected."""
    log_to_stderr()
    try:
        prepared = prepare(parse_options(argv))
    except CannotStart as error:
        _log.error("%s", error)
        return EXIT_CONFIG
    return serve(prepared, prepared.options.worker_fd, prepared.options.worker_pid)


def serve(prepared: Prepared, worker_fd: int, worker_pid: int | None) -> int:
    """Serve with that worker until SIGTERM; the descriptor is ours from now on."""
    logging.getLogger("uvicorn.error").addFilter(_OwnAborts())
    try:
        worker = socket.socket(fileno=worker_fd)
    except (OSError, ValueError) as error:
        _log.error("--worker-fd %d: %s", worker_fd, error)
        return EXIT_CONFIG
    many_files()
    asyncio.run(ApiProcess(prepared, worker, worker_pid).run())
    return 0


def log_to_stderr() -> None:
    """One line an event, with the level first."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s"
    )


if __name__ == "__main__":
    sys.exit(main())
