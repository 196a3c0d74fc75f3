"""The offload process's loop: one request at a time, all rows stored before any rank is told.

A request that arrives while another is served would overwrite inputs or rows somewhere: it ends the
process with a sentence instead, and every rank learns of it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

import torch

from stallwatch.heartbeat import Lane
from stallwatch_engine.faults import Faults
from stallwatch_engine.ple.errors import ProtocolBroken, RegistrationRefused
from stallwatch_engine.ple.offload import wire
from stallwatch_engine.ple.offload.memory import (
    CONSUMED,
    ROWS_OF,
    WANTED,
    Layout,
    SharedMemory,
    Slot,
    is_sealed,
)
from stallwatch_engine.ple.offload.registration import Registration, Roster
from stallwatch_engine.ple.offload.wire import Kind, Step, Text
from stallwatch_engine.ple.protocol import RowSource
from stallwatch_engine.ple.resident import warm_up
from stallwatch_engine.ple.shape import PleShape, check_step
from stallwatch_engine.streams.bounded import wait_for

CONSUME_LIMIT_S = 5.0  # how long a following rank may take to read rows that the leader has read
WARM_UP_LIMIT_S = 600.0
LEADER = 0
REQUESTS = f"worker:{LEADER}/ple-request"
POLL_S = 0.1


class Server:
    """Serves the ranks behind `sockets` (index = rank) from `source` until one hangs up."""

    def __init__(
        self,
        source: RowSource,
        sockets: Sequence[socket.socket],
        lane: Lane,
        *,
        faults: Faults,
        on_serving: Callable[[], object],
    ) -> None:
        self._source = source
        self._sockets = list(sockets)
        self._lane = lane
        self._faults = faults
        self._on_serving = on_serving
        self._gathering = lane.marker("ple_gather", "seq", "tokens")
        self._poller = select.poll()
        self._rank_of = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        for fd in self._rank_of:
            self._poller.register(fd, select.POLLIN)
        self._memories: dict[int, SharedMemory] = {}
        self._shape: PleShape | None = None
        self._served = -1

    def run(self) -> None:
        """Returns when a rank hangs up. Errors are sent to every rank, then raised."""
        try:
            self._register()
            self._on_serving()
            for sock in self._sockets:
                wire.send(sock, Text(Kind.SERVING))
            while self._serve_one():
                pass
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            wire.give_up(self._sockets, error)
            raise

    def _register(self) -> None:
        roster = Roster(len(self._sockets), self._source)
        while not roster.complete:
            # Nobody's fault yet: the ranks may still load.
            self._lane.idle(on="worker:*/model")
            for rank in self._readable():
                message, fd = wire.receive(self._sockets[rank])
                try:
                    self._admit(roster, rank, message, fd)
                finally:
                    if fd >= 0:
                        os.close(fd)
        assert self._shape is not None
        with self._lane.phase("warm_up", cls="start", limit=WARM_UP_LIMIT_S):
            warm_up(self._source, self._shape)

    def _admit(self, roster: Roster, rank: int, message: Step | Text, fd: int) -> None:
        if not isinstance(message, Text) or message.kind is not Kind.REGISTER or fd < 0:
            raise ProtocolBroken(f"rank {rank} sent {message.kind.name} before all had registered")
        new = Registration.parse(message.body, rank)
        size, needed = os.fstat(fd).st_size, Layout.of(new.shape).size
        if not is_sealed(fd):
            raise RegistrationRefused(rank, "memory", "is not sealed: it could be cut short")
        roster.add(rank, new, size=size, needed=needed)
        self._memories[rank] = SharedMemory(fd, new.shape)
        self._shape = new.shape

    def _serve_one(self) -> bool:
        step = self._request(self._await_request())
        self._gathering(step.seq, step.tokens)
        self._before(step)
        self._store(step)
        self._refuse_overlap(step)
        self._publish(step)
        self._lane.progress(step.tokens)
        return True

    def _await_request(self) -> list[int]:
        """Idle, until a forward waits for rows that nobody has asked for: then it is a declared wait.

        That is what makes the circle of model stream, offload and request thread one that can be proven.
        """
        self._lane.idle(on=REQUESTS)
        declared = False
        while not (ranks := self._readable(POLL_S)):
            wanted = max(slot.stamps[WANTED] for slot in self._memories[LEADER].slots)
            if wanted > self._served and not declared:
                self._lane.wait("ple_request", on=REQUESTS, seq=wanted)
                declared = True
        return ranks

    def _request(self, ranks: list[int]) -> Step:
        """The one request. Following ranks have nothing to say, except goodbye."""
        step: Step | None = None
        for rank in ranks:
            message, fd = wire.receive(self._sockets[rank])
            if fd >= 0:
                os.close(fd)
            if rank != LEADER or not isinstance(message, Step) or message.kind is not Kind.REQUEST:
                raise ProtocolBroken(f"rank {rank} sent {message.kind.name} while serving")
            step = message
        if step is None:
            raise ProtocolBroken("no request where one was seen")
        return step

    def _store(self, step: Step) -> None:
        """Check everything, gather once, copy to the other ranks."""
        assert self._shape is not None
        shape = self._shape
        if self._served >= 0 and step.seq != self._served + 1:
            raise ProtocolBroken(f"step {step.seq} was requested after step {self._served}")
        if step.slot != step.seq % shape.max_in_flight:
            raise ProtocolBroken(f"step {step.seq} was requested in slot {step.slot}")
        if not (0 < step.tokens <= shape.max_tokens and 0 < step.requests <= shape.max_requests):
            raise ProtocolBroken(
                f"step {step.seq} has {step.tokens} tokens, {step.requests} requests"
            )
        slots = [self._memories[rank].slots[step.slot] for rank in range(len(self._sockets))]
        for rank, slot in enumerate(slots):
            self._await_consumed(rank, slot, step.seq - shape.max_in_flight)
        lead = slots[LEADER]
        # Copies: what is hashed is what was checked, whatever a rank writes meanwhile.
        ids = lead.ids[: step.tokens].clamp(min=0)
        starts = lead.starts[: step.requests + 1].clone()
        context = lead.context[: step.requests].clone()
        check_step(shape, ids, starts, context)
        rows = lead.rows[:, : step.tokens]
        lead.stamps[ROWS_OF] = -1
        self._source.gather(ids, starts, context, rows)
        for slot in slots[1:]:
            slot.stamps[ROWS_OF] = -1
            slot.rows[:, : step.tokens].copy_(rows)
        for slot in slots:
            slot.stamps[ROWS_OF] = step.seq

    def _await_consumed(self, rank: int, slot: Slot, seq: int) -> None:
        def read() -> bool:
            return slot.stamps[CONSUMED] >= seq

        if seq < 0 or slot.stamps[ROWS_OF] < 0 or read():
            return
        self._lane.wait("rows_consumed", on=f"worker:{rank}/stream/model", seq=seq)
        wait_for(read, CONSUME_LIMIT_S, operation=f"reading step {seq} on rank {rank}")

    def _refuse_overlap(self, step: Step) -> None:
        if LEADER not in self._readable(0.0):
            return
        if self._sockets[LEADER].recv(1, socket.MSG_PEEK):
            raise ProtocolBroken(
                f"a second request arrived while step {step.seq} was served: its rows could be stale"
            )
        raise EOFError("the leading rank hung up")

    def _publish(self, step: Step) -> None:
        self._hit("offload.kill_before_ready", step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        ready = Step(Kind.READY, step.slot, step.seq, step.tokens)
        if self._faults.hit("offload.out_of_order", step.seq):
            ready = Step(Kind.READY, step.slot, step.seq + 1, step.tokens)
        self._served = step.seq
        for sock in self._sockets:
            wire.send(sock, ready)
            if self._faults.hit("offload.duplicate", step.seq):
                wire.send(sock, ready)

    def _before(self, step: Step) -> None:
        self._hit("offload.kill", step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        self._hit("offload.stop", step, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        slow = self._faults.hit("offload.slow", step.seq)
        if slow is not None:
            time.sleep(slow.seconds)

    def _hit(self, name: str, step: Step, deed: Callable[[], None]) -> None:
        if self._faults.hit(name, step.seq) is not None:
            deed()

    def _readable(self, timeout_s: float | None = None) -> list[int]:
        """Ranks whose socket has something. Without a timeout it waits: the death watch ends that."""
        found = self._poller.poll(None if timeout_s is None else timeout_s * 1e3)
        return sorted(self._rank_of[fd] for fd, _ in found)


def limit_threads() -> None:
    """One thread: the gather parallelises by itself where it pays."""
    torch.set_num_threads(1)
