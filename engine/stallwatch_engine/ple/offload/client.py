"""A rank's side of the offload process: the common PLE interface over its socket and memory."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import torch

from stallwatch_engine.faults import Faults
from stallwatch_engine.ple.errors import OffloadDied, PleFailed, ProtocolBroken, StaleRows
from stallwatch_engine.ple.ledger import Ledger
from stallwatch_engine.ple.offload import wire
from stallwatch_engine.ple.offload.memory import CONSUMED, ROWS_OF, WANTED, SharedMemory, allocate
from stallwatch_engine.ple.offload.process import OffloadProcess
from stallwatch_engine.ple.offload.registration import Registration
from stallwatch_engine.ple.offload.wire import Kind, Step, Text
from stallwatch_engine.ple.resident import late
from stallwatch_engine.ple.shape import PleShape, check_step
from stallwatch_engine.streams.bounded import check_deadline

LAST_WORDS_S = 1.0


class OffloadBackend:
    """Rank `rank` of the process. Only rank 0 sends requests; all of them call submit in step.

    Registers in the constructor; serving() waits for the process. close() leaves the process alone:
    whoever started it ends it.
    """

    def __init__(
        self,
        process: OffloadProcess,
        shape: PleShape,
        *,
        rank: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self._process = process
        self._socket: socket.socket = process.sockets[rank]
        self._shape = shape
        self._rank = rank
        self._faults = faults or Faults()
        self._ledger = Ledger(shape.max_in_flight)
        self._lock = threading.Lock()  # ledger and failure; never held while waiting
        self._receiving = threading.Lock()  # the socket's one reader
        self._failure: PleFailed | None = None
        self._serving = False
        self._early: list[int] = []  # steps that were ready before this rank submitted them
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        for fd in (self._socket.fileno(), process.pidfd, self._wake_fd):
            self._poller.register(fd, select.POLLIN)
        fd = allocate(shape)
        try:
            self._memory = SharedMemory(fd, shape)
            record = Registration(rank, len(process.sockets), shape).pack()
            wire.send(self._socket, Text(Kind.REGISTER, record), fd)
        except OSError as error:
            raise OffloadDied(process.pid, process.status()) from error
        finally:
            os.close(fd)

    @property
    def shape(self) -> PleShape:
        return self._shape

    def serving(self, deadline: float) -> None:
        """Wait until all ranks are registered. PleFailed when refused, TimeoutError when late."""
        self._receive_until(lambda: self._serving, deadline, "the PLE offload process to serve")

    def submit(
        self, seq: int, ids: torch.Tensor, query_start_loc: torch.Tensor, context: torch.Tensor
    ) -> None:
        tokens, requests = check_step(self._shape, ids, query_start_loc, context)
        with self._lock:
            self._check()
            number = self._ledger.submit(seq, tokens)
            if self._rank != 0:  # rank 0 asks for all, and may have been answered already
                if seq in self._early:
                    self._early.remove(seq)
                    self._ledger.ready(seq)
                return
        slot = self._memory.slots[number]
        slot.ids[:tokens].copy_(ids)
        slot.starts[: requests + 1].copy_(query_start_loc)
        slot.context[:requests].copy_(context)
        request = Step(Kind.REQUEST, number, seq, tokens, requests)
        try:
            wire.send(self._socket, request)
            if self._faults.hit("offload.double_request", seq):
                wire.send(self._socket, request)
        except OSError as error:
            raise self._last_words() from error

    def wait(self, seq: int, deadline: float) -> torch.Tensor:
        with self._lock:
            self._ledger.check_wait(seq)
        # Told even before it is submitted: the process then declares that it lacks the request.
        self._memory.slots[self._ledger.slot(seq)].stamps[WANTED] = seq
        self._receive_until(lambda: self._ledger.is_ready(seq), deadline, "", seq)
        with self._lock:
            tokens = self._ledger.take(seq)
        self._check_stamp(seq)
        return self._memory.slots[self._ledger.slot(seq)].rows[:, :tokens]

    def consumed(self, seq: int) -> None:
        self._check_stamp(seq)  # overwritten while they were read: say so rather than go on
        with self._lock:
            slot = self._ledger.consume(seq)
        self._memory.slots[slot].stamps[CONSUMED] = seq

    def buffer(self, slot: int) -> torch.Tensor:
        return self._memory.slots[slot].rows

    def fail(self, error: BaseException) -> None:
        self._fail(PleFailed(f"no PLE rows will come: {error}"))

    def close(self) -> None:
        if self._wake_fd < 0:
            return
        self.fail(RuntimeError("the backend was closed"))
        with self._receiving:
            os.close(self._wake_fd)
            self._wake_fd = -1
            self._memory.slots.clear()  # the mapping goes with its last tensor

    def _check_stamp(self, seq: int) -> None:
        with self._lock:
            self._check()
        found = self._memory.slots[self._ledger.slot(seq)].stamps[ROWS_OF]
        if found != seq:
            raise self._fail(StaleRows(seq, found))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: PleFailed) -> PleFailed:
        """Remember the first failure and wake whoever waits; returns it."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
            return self._failure

    def _receive_until(
        self, done: Callable[[], bool], deadline: float, operation: str, seq: int = -1
    ) -> None:
        began = time.monotonic()
        check_deadline(deadline)
        left = max(0.0, deadline - began)
        if not self._receiving.acquire(timeout=left):
            raise TimeoutError(
                f"another thread waits for the PLE offload process since {left:.3g} s"
            )
        try:
            while True:
                with self._lock:
                    if done():
                        return
                    self._check()
                if not self._receive(deadline):
                    seconds = deadline - began
                    what = late(seq, seconds, self._ledger) if seq >= 0 else ""
                    raise TimeoutError(what or f"{operation} took more than {seconds:.3g} s")
        finally:
            self._receiving.release()

    def _receive(self, deadline: float) -> bool:
        """Take one message, or notice a death; False at the deadline."""
        left = deadline - time.monotonic()
        found = dict(self._poller.poll(max(0, math.ceil(left * 1e3))))
        # The socket first: rows that were published before a death are good.
        if self._socket.fileno() in found:
            self._take_message()
        elif self._process.pidfd in found:
            self._fail(OffloadDied(self._process.pid, self._process.status()))
        return bool(found) or left > 0

    def _take_message(self) -> None:
        try:
            message, fd = self._receive_message()
            if fd >= 0:
                os.close(fd)
            self._take(message)
        except (EOFError, OSError):
            self._process_gone()
        except PleFailed as error:
            self._fail(error)

    def _receive_message(self) -> tuple[Step | Text, int]:
        try:
            return wire.receive(self._socket)
        except ConnectionResetError:
            # It ended with a message of ours unread. What it said before that is still to be had.
            return wire.receive(self._socket)

    def _last_words(self) -> PleFailed:
        """Why the process ended if it said so, or that it ended; for a send that failed."""
        if self._receiving.acquire(timeout=LAST_WORDS_S):  # another reader hears of the end as well
            try:
                while self._failure is None and self._receive(time.monotonic()):
                    pass
            finally:
                self._receiving.release()
        return self._fail(OffloadDied(self._process.pid, self._process.status()))

    def _process_gone(self) -> None:
        poller = select.poll()
        poller.register(self._process.pidfd, select.POLLIN)
        poller.poll(1000)  # it hung up, so its end is near: then the status can be told
        self._fail(OffloadDied(self._process.pid, self._process.status()))

    def _take(self, message: Step | Text) -> None:
        if isinstance(message, Text):
            if message.kind is Kind.SERVING and not self._serving:
                self._serving = True
                return
            if message.kind is Kind.FATAL:
                text = message.body.decode(errors="replace")
                raise PleFailed(f"the PLE offload process gave up: {text}")
        elif message.kind is Kind.READY and self._serving:
            with self._lock:
                early = self._rank != 0 and not self._ledger.is_submitted(message.seq)
                if early and len(self._early) < self._shape.max_in_flight:
                    self._early.append(message.seq)
                else:
                    self._ledger.ready(message.seq)
            return
        raise ProtocolBroken(f"the PLE offload process sent {message.kind.name} at a wrong time")
