"""`stallwatch engine serve`: this process becomes the api; the worker is its child.

The worker ends with this process, whatever ends it: the socket closes, a pipe closes, and the kernel
signals the child. The worker's death is answered to every client first, then this process ends too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from stallwatch_engine.api.prepare import CannotStart, Prepared, parse_options, prepare
from stallwatch_engine.checkpoint.errors import BadCheckpoint
from stallwatch_engine.checkpoint.listing import Listing

ANSWER_S = 2.0  # what clients get to read their answer before the process goes
END_S = 20.0  # the worker closes tables and processes within that
KILL_S = 5.0
EXIT_LOST = 1
EXIT_CONFIG = 2

log = logging.getLogger("stallwatch.engine")


def serve(options: str, api_arguments: Sequence[str]) -> int:
    """Run worker and api until SIGTERM. `options` is WorkerOptions as JSON, `api_arguments` the api's own.

    0: stopped as asked. 1: the worker was lost. 2: something is to be corrected; what can be seen without
    loading is seen before there is a worker.
    """
    signal.signal(signal.SIGTERM, _too_early)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    given = parse_options(list(api_arguments))
    try:
        Listing.read(Path(given.model))
        prepared = prepare(given)
    except (BadCheckpoint, CannotStart) as error:
        log.error("%s", error)
        return EXIT_CONFIG
    near, far = socket.socketpair()
    with near, _worker(options, far) as worker:
        ending = threading.Event()
        threading.Thread(
            target=_watch, args=(worker, ending), name="worker-watch", daemon=True
        ).start()
        code = EXIT_LOST
        try:
            # A descriptor of its own, because the api closes what it is given.
            code = _api(prepared, os.dup(near.fileno()), worker.pid)
        finally:
            ending.set()
            lost = worker.poll()
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)  # the worker's end of file, whoever holds copies
            if code:
                worker.terminate()  # it may be loading still, for nobody
    if lost is None:
        return code
    log.error("the worker ended: status %d", lost)
    return code or (lost if lost > 0 else EXIT_LOST)


def worker_options(model: str, given: Mapping[str, Any]) -> str:
    """The worker's options as JSON; written here because WorkerOptions imports torch."""
    return json.dumps({"model": model, **given})


def _api(prepared: Prepared, worker_fd: int, worker_pid: int) -> int:
    from stallwatch_engine.api.main import serve as run  # late: the worker loads meanwhile

    try:
        return run(prepared, worker_fd, worker_pid)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_LOST


def _too_early(number: int, _frame: FrameType | None) -> None:
    """SIGTERM before the api listens for it."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _worker(options: str, end: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    """The worker process, for as long as the context lasts; ended and reaped afterwards."""
    read_end, death_fd = os.pipe()
    command = [sys.executable, "-m", "stallwatch_engine.worker.main", f"--options={options}"]
    command += [f"--fd={end.fileno()}", f"--death-fd={read_end}", f"--parent={os.getpid()}"]
    try:
        worker = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[end.fileno(), read_end]
        )
    finally:
        os.close(read_end)
        end.close()
    try:
        yield worker
    finally:
        try:
            worker.wait(END_S)
        except subprocess.TimeoutExpired:
            log.error("the worker did not end within %g s and is killed", END_S)
            worker.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(KILL_S)  # in a driver's call it stays: whoever ends us tells that
        os.close(death_fd)  # last: it ends a worker at once


def _watch(worker: subprocess.Popen[bytes], ending: threading.Event) -> None:
    """The worker ended by itself: let the answers be written, then end as after SIGTERM."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    if not ending.wait(ANSWER_S):
        os.kill(os.getpid(), signal.SIGTERM)
