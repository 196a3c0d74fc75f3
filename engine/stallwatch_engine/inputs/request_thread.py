"""The thread that hands staged inputs to the PLE backend, one step after the other.

Its failure is the engine's: it tells the backend, so that no forward waits for rows that will never be
asked for, and the next stage() raises it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from stallwatch.heartbeat import Lane
from stallwatch_engine.inputs.step import StepInputs
from stallwatch_engine.ple.protocol import PleBackend
from stallwatch_engine.streams.bounded import check_timeout
from stallwatch_engine.streams.errors import OverContract

Job = TypeVar("Job")


class RequestThread(Generic[Job]):
    """Calls `prepare(job, lane)` for each job in order, and hands what it returns to the backend.

    `capacity` jobs may be reserved and not yet handed over. `make_lane` is called in the thread, which
    owns the lane. `worker` is the address of this process, such as worker:0.
    """

    def __init__(
        self,
        backend: PleBackend,
        prepare: Callable[[Job, Lane], StepInputs],
        *,
        capacity: int,
        make_lane: Callable[[], Lane],
        worker: str,
    ) -> None:
        self.capacity = capacity
        self._backend = backend
        self._prepare = prepare
        self._make_lane = make_lane
        self._supplier = f"{worker}/model"
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0  # reserved, and not yet the backend's
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ple-request", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the thread died of."""
        if self._error is not None:
            raise RuntimeError(f"the PLE request thread ended: {self._error}") from self._error

    def reserve(self) -> None:
        """Room for one job; OverContract when `capacity` are under way. Follow it by put() or cancel()."""
        self.check()
        with self._lock:
            if self._closed:
                raise RuntimeError("the PLE request thread was closed")
            if self._open >= self.capacity:
                raise OverContract("PLE requests under way", self.capacity)
            self._open += 1

    def cancel(self) -> None:
        """Give a reserved room back."""
        with self._lock:
            self._open -= 1

    def put(self, job: Job) -> None:
        """Queue the job that room was reserved for."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, then end. TimeoutError when a submit does not return."""
        check_timeout(timeout_s)
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the PLE request thread did not end within {timeout_s:g} s")

    def _run(self) -> None:
        lane = None
        try:
            lane = self._make_lane()
            while True:
                lane.idle(on=self._supplier)
                job = self._jobs.get()
                if job is None:
                    return
                own = self._prepare(job, lane)
                lane.enter("ple_submit", seq=own.seq, tokens=own.ids.shape[0])
                # Given back before the rows can be there: the host may stage the next step at once.
                self.cancel()
                self._backend.submit(own.seq, own.ids, own.query_start_loc, own.context)
                lane.progress(1)
        except BaseException as error:
            self._error = error
            self._backend.fail(error)
        finally:
            if lane is not None:
                lane.close()
