"""`python -m stallwatch_engine.worker.main`: started by `stallwatch engine serve`, never by hand."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading

from stallwatch import heartbeat
from stallwatch_engine.faults import Faults
from stallwatch_engine.ple.errors import PleFailed
from stallwatch_engine.ple.offload import parentage
from stallwatch_engine.wire import PeerGone, WorkerEnd

EXIT_CONFIG = 2

log = logging.getLogger("stallwatch.worker")


def main(arguments: list[str] | None = None) -> int:
    """0: the api ended. 1: a step failed, the worker must be replaced. 2: options or checkpoint are wrong."""
    given = _parse(arguments)
    parentage.watch(given.death_fd, given.parent, signalled=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the api, which ends us
    logging.basicConfig(level=logging.INFO, format="worker: %(message)s", stream=sys.stderr)
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("scheduler")
    with lane.phase("import", cls="start", limit=600.0):
        # torch comes late: a parent that dies during its import must already be noticed
        from stallwatch_engine.worker.serve import leave, refused, serve

    try:
        serve(given.options, WorkerEnd.from_fd(given.fd), board, Faults.from_environment())
    except refused() as error:
        log.error("%s", error)
        return EXIT_CONFIG
    except PeerGone as error:
        log.info("%s", error)
    except PleFailed as error:  # at the start: the offload process has said what is wrong
        log.error("%s", error)
        leave()
    except Exception:
        log.exception("the worker ends")
        leave()
    board.close()
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--options", required=True, help="WorkerOptions as JSON")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the api")
    parser.add_argument("--death-fd", type=int, required=True, help="its end of file: parent died")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    threading.current_thread().name = "scheduler"
    sys.exit(main())
