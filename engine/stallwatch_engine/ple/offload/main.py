"""`python -m stallwatch_engine.ple.offload.main`: started by process.py, never by hand."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from stallwatch import heartbeat
from stallwatch.heartbeat import Lane
from stallwatch_engine.faults import SWITCH, Faults
from stallwatch_engine.ple.errors import AnotherCheckpoint, NoRoom, TableChanged
from stallwatch_engine.ple.offload import parentage, wire

if TYPE_CHECKING:
    from stallwatch_engine.ple.protocol import RowSource  # it imports torch

LOAD_LIMIT_S = 1800.0
Factory = Callable[[Mapping[str, Any], Lane], "RowSource"]
SAID = (AnotherCheckpoint, NoRoom, TableChanged)  # whose sentence is enough

log = logging.getLogger("stallwatch.offload")


def main(arguments: list[str] | None = None) -> int:
    """Load the tables, register the ranks, serve. 0 when the ranks hang up, 1 after an error."""
    options = _parse(arguments)
    parentage.watch(options.death_fd, options.parent, signalled=options.death_signal)
    logging.basicConfig(level=logging.INFO, format="offload: %(message)s", stream=sys.stderr)
    faults = Faults.from_environment()
    board = heartbeat.attach(role="offload", rank=0)
    lane = board.lane("ple")
    sockets = [socket.socket(fileno=int(fd)) for fd in options.rank_fds.split(",")]
    try:
        source = _load(options, lane)
    except (
        Exception
    ) as error:  # the folder, the disk, the files: the ranks can say it to the operator
        wire.give_up(sockets, error)
        log.error("the tables cannot be opened: %s", error, exc_info=not isinstance(error, SAID))
        return 1
    from stallwatch_engine.ple.offload.server import Server

    try:
        Server(source, sockets, lane, faults=faults, on_serving=board.ready).run()
    except Exception:
        log.exception("PLE offload ends")
        return 1
    finally:
        board.close()
    return 0


def _load(options: argparse.Namespace, lane: Lane) -> RowSource:
    with lane.phase("load_table", cls="start", limit=LOAD_LIMIT_S):
        # torch comes late: a parent that dies during its import must already be noticed
        from stallwatch_engine.ple import numa
        from stallwatch_engine.ple.offload.server import limit_threads

        limit_threads()
        for step in numa.settle(options.cpus):
            log.info("%s", step)
        return factory(options.factory)(json.loads(options.spec), lane)


def factory(name: str) -> Factory:
    """The function `module:name` that opens the tables. Ours only, except in tests."""
    module, _, function = name.partition(":")
    ours = module.startswith("stallwatch_engine.")
    if not (ours or os.environ.get(SWITCH) == "1"):
        raise ValueError(f"{name}: PLE tables are opened by stallwatch_engine alone")
    return cast("Factory", getattr(importlib.import_module(module), function))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--factory", required=True, help="module:function that opens the tables")
    parser.add_argument("--spec", required=True, help="JSON object for the factory")
    parser.add_argument("--rank-fds", required=True, help="inherited sockets, by rank")
    parser.add_argument("--death-fd", type=int, required=True, help="its end of file: parent died")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--death-signal", action="store_true", help="and tell the kernel so")
    parser.add_argument("--cpus", default="", help="cpulist to stay on, such as 0-7,16")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    threading.current_thread().name = "ple"
    sys.exit(main())
