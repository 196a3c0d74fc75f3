"""A worker from its options to its end."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable
from typing import NoReturn

from stallwatch.heartbeat import Board, Lane
from stallwatch_engine.checkpoint.config import ARCHITECTURE
from stallwatch_engine.checkpoint.errors import BadCheckpoint
from stallwatch_engine.faults import Faults
from stallwatch_engine.ple.errors import AnotherCheckpoint, NoRoom
from stallwatch_engine.schedule.plan import StepPlan
from stallwatch_engine.schedule.scheduler import Scheduler
from stallwatch_engine.wire import PeerBusy, Ready, WorkerEnd
from stallwatch_engine.wire.worker_end import PEER
from stallwatch_engine.worker.build import Built, build
from stallwatch_engine.worker.engine import Engine, Inbox, Message, StepFailed, Vocabulary
from stallwatch_engine.worker.injected import inject
from stallwatch_engine.worker.options import BadOptions, WorkerOptions
from stallwatch_engine.worker.threads import ModelThread, WireThread

CLOSE_S = 2.0
# Over the limit of the api's own loop, which is judged first, and under SEND_S.
READ_LIMIT_S = 45.0
EXIT_FAILED = 1

log = logging.getLogger("stallwatch.worker")


def refused() -> tuple[type[Exception], ...]:
    """What the operator must correct."""
    return BadOptions, BadCheckpoint, AnotherCheckpoint, NoRoom


def serve(text: str, end: WorkerEnd, board: Board, faults: Faults) -> None:
    """Serve until the api ends; a failed step ends the process. Raises what `refused` names, and what a start raises."""
    options = WorkerOptions.parse(text)
    lane = board.lane("scheduler")
    inbox: Inbox = queue.SimpleQueue()
    with build(options, board, lane, inbox.put, faults=faults) as built:

        def launch(plan: StepPlan) -> None:
            inject(faults, plan.step)
            built.executor.launch(plan)

        model = ModelThread(launch, inbox, lambda: board.lane("model"))
        engine = Engine(
            Scheduler(built.limits),
            inbox,
            launch=model.put,
            send=speaker(end, lane),
            tokens=Vocabulary(built.config.vocab, frozenset(built.config.eos)),
            lane=lane,
            gauge=board,
        )
        end.send(_ready(built, options.device))
        board.ready()
        WireThread(end, inbox, lambda: board.lane("wire"))
        try:
            engine.run()
        except (StepFailed, PeerBusy):
            log.exception("the worker is to be replaced")
            leave()
        finally:
            lane.enter("close", cls="stop")
        model.close(CLOSE_S)


def speaker(end: WorkerEnd, lane: Lane) -> Callable[[Message], None]:
    """Sends to the api. While the api does not read, the lane says whom it waits for.

    It says so until its next mark, which the scheduler sets right after it has sent.
    """

    def blocked() -> None:
        lane.wait("api_read", on=PEER, limit=READ_LIMIT_S)

    return lambda message: end.send(message, blocked=blocked)


def leave() -> NoReturn:
    """End now: threads of a failed step may never end, and nothing that they hold outlives the process."""
    logging.shutdown()
    os._exit(EXIT_FAILED)


def _ready(built: Built, device: str) -> Ready:
    return Ready(
        architecture=ARCHITECTURE,
        device=device,
        dtype=str(built.dtype).removeprefix("torch."),
        vocab_size=built.config.vocab,
        max_model_len=built.limits.capacity,
        max_num_seqs=built.limits.max_seqs,
    )
