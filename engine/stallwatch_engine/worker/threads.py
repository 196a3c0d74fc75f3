"""The worker's two other threads: one launches steps, one listens to the api."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from stallwatch.heartbeat import Lane
from stallwatch_engine.output.answers import Failure
from stallwatch_engine.schedule.plan import StepPlan
from stallwatch_engine.wire import WireError, WorkerEnd
from stallwatch_engine.worker.engine import ApiEnded, Inbox

LISTEN_S = 1.0
MOST_UNREAD = 1024  # messages that a scheduler that stands still leaves unread
FULL_POLL_S = 0.01


class ModelThread:
    """Takes plans to the executor. A launch that raises is that step's failure."""

    def __init__(
        self,
        launch: Callable[[StepPlan], None],
        inbox: Inbox,
        make_lane: Callable[[], Lane],
    ) -> None:
        self._launch = launch
        self._inbox = inbox
        self._make_lane = make_lane
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def put(self, plan: StepPlan) -> None:
        """Queue a step; the scheduler's contract bounds how many."""
        self._plans.put(plan)

    def close(self, timeout_s: float) -> None:
        """End after what is queued."""
        self._plans.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        lane = self._make_lane()
        while True:
            lane.idle(on="worker:0/scheduler")
            plan = self._plans.get()
            if plan is None:
                lane.close()
                return
            lane.enter("launch", step=plan.step, tokens=plan.tokens)
            try:
                self._launch(plan)
            except Exception as error:  # whatever it is, the step has no result
                self._inbox.put(Failure(plan.step, error))
            lane.progress(1)


class WireThread:
    """Puts what the api says into the inbox, and its end last."""

    def __init__(self, end: WorkerEnd, inbox: Inbox, make_lane: Callable[[], Lane]) -> None:
        self._end = end
        self._inbox = inbox
        self._make_lane = make_lane
        threading.Thread(target=self._run, name="wire", daemon=True).start()

    def _run(self) -> None:
        lane = self._make_lane()
        while True:
            if self._inbox.qsize() >= MOST_UNREAD:
                # the socket fills up, and the api refuses new requests by its own bound
                lane.wait("inbox_full", on="worker:0/scheduler")
                while self._inbox.qsize() >= MOST_UNREAD:
                    time.sleep(FULL_POLL_S)
            lane.idle(on="api:0/loop")
            try:
                messages = self._end.receive(LISTEN_S)
            except WireError as reason:
                self._inbox.put(ApiEnded(reason))
                lane.close()
                return
            for message in messages:
                self._inbox.put(message)
