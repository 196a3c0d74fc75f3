"""The offload process: right rows or an explicit failure, never old rows, and an end in every case."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest
import torch

import ple_tables
from heartbeat_helpers import attach, folder_in, look
from ple_cycle import Harness, start_offload
from stallwatch.board.reader import BoardReader
from stallwatch.heartbeat import Board
from stallwatch_engine.faults import SWITCH, VARIABLE, Fault, Faults
from stallwatch_engine.ple.errors import (
    NoRoom,
    OffloadDied,
    PleFailed,
    ProtocolBroken,
    RegistrationRefused,
    StaleRows,
)
from stallwatch_engine.ple.offload import process as process_module
from stallwatch_engine.ple.offload import wire
from stallwatch_engine.ple.offload.client import OffloadBackend
from stallwatch_engine.ple.offload.memory import Layout, allocate, check_memory, is_sealed
from stallwatch_engine.ple.offload.registration import Registration, Roster
from stallwatch_engine.ple.offload.server import Server
from stallwatch_engine.ple.offload.wire import Kind, Step, Text
from stallwatch_engine.ple.shape import PleShape
from stallwatch_engine.ple.tables import load

LIMIT_S = 60.0
ROWS_OF = 0


def quiet() -> Board:
    return Board(None, "worker", 0, 0)


def soon() -> float:
    return time.monotonic() + LIMIT_S


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return ple_tables.spec(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def source(tables):
    return load(tables, quiet().lane("load"))


@pytest.fixture(scope="module")
def shape(tables):
    return ple_tables.shape(tables)


class Local:
    """The server's loop in a thread, behind the same sockets: the protocol without a process."""

    def __init__(self, source, *, ranks=1, faults: Faults | None = None) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(ranks)]
        self.sockets = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._server = Server(
            source,
            self._theirs,
            quiet().lane("ple"),
            faults=faults or Faults(),
            on_serving=lambda: None,
        )
        self.errors: list[BaseException] = []
        self.pid, self._end = os.getpid(), os.eventfd(0)
        self.pidfd = os.dup(self._end)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.run()
        except Exception as error:
            self.errors.append(error)
        os.eventfd_write(self._end, 1)

    def status(self) -> str:
        return "a thread that ended"

    def close(self) -> None:
        for ours in self.sockets:
            ours.close()
        self._thread.join(LIMIT_S)
        for theirs in self._theirs:
            theirs.close()
        os.close(self._end)
        os.close(self.pidfd)
        assert not self._thread.is_alive()


@pytest.fixture
def local(source, shape):
    """(server, backends by rank), serving."""
    with ExitStack() as stack:

        def make(*, ranks=1, faults=None, client_faults=None):
            server = Local(source, ranks=ranks, faults=faults)
            stack.callback(server.close)
            backends = []
            for rank in range(ranks):
                backends.append(OffloadBackend(server, shape, rank=rank, faults=client_faults))
                stack.callback(backends[-1].close)
            for backend in backends:
                backend.serving(soon())
            return server, backends

        yield make


def steps(backend, source, numbers: range) -> None:
    """Whole steps, one after the other."""
    for seq in numbers:
        backend.submit(seq, *ple_tables.step(seq))
        take(backend, source, seq)


def ended(process) -> str:
    """How a process ended that ends by itself; a loaded host takes its time for it."""
    poller = select.poll()
    poller.register(process.pidfd, select.POLLIN)
    assert poller.poll(LIMIT_S * 1e3)
    return process.close()


def take(backend, source, seq: int) -> None:
    """One whole step with the right rows, and a canary left in the buffer."""
    rows = backend.wait(seq, soon())
    assert torch.equal(rows, ple_tables.rows_of(source, backend.shape, seq))
    rows.fill_(torch.nan)
    backend.consumed(seq)


def test_steps_come_back_in_order_with_their_own_rows(local, source):
    """Buffers are used again and again, and each is overwritten with NaN in between."""
    _, (backend,) = local()
    for seq in range(60):
        backend.submit(seq, *ple_tables.step(seq))
        take(backend, source, seq)


def test_two_registered_ranks_get_the_same_rows(local, source):
    """Rank 0 asks for both; the other may be early or late."""
    _, (lead, other) = local(ranks=2)
    for seq in range(20):
        first, second = (lead, other) if seq % 2 else (other, lead)
        first.submit(seq, *ple_tables.step(seq))
        if seq % 4 == 1:
            take(lead, source, seq)
        second.submit(seq, *ple_tables.step(seq))
        if seq % 4 != 1:
            take(lead, source, seq)
        take(other, source, seq)


def test_negative_ids_are_placeholders_and_count_as_zero(local, source, shape):
    """A C modulo of a negative id would address rows outside of the head."""
    _, (backend,) = local()
    ids, starts, context = ple_tables.step(0)
    ids[:] = -1
    backend.submit(0, ids, starts, context)
    rows = backend.wait(0, soon())
    expected = torch.empty_like(rows, memory_format=torch.contiguous_format)
    source.gather(torch.zeros_like(ids), starts, context, expected)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("name", ["offload.duplicate", "offload.out_of_order"])
def test_a_wrong_ready_message_is_a_failure_and_no_rows(local, source, name):
    """Published twice, or with the next step's number: never believed."""
    _, (backend,) = local(faults=Faults((Fault(name, "2"),)))
    with pytest.raises(ProtocolBroken, match="published"):
        steps(backend, source, range(6))
    with pytest.raises(PleFailed):
        backend.wait(6, soon())


def test_a_second_request_of_one_rank_is_fatal(local, source):
    """Warned about and skipped, it would leave old rows where new ones are expected."""
    server, (backend,) = local(client_faults=Faults((Fault("offload.double_request", "1"),)))
    with pytest.raises(PleFailed):
        steps(backend, source, range(4))
    server._thread.join(LIMIT_S)
    assert isinstance(server.errors[0], ProtocolBroken)


def test_a_slow_process_is_a_timeout_that_names_the_step_and_then_the_right_rows(local, source):
    """Late rows are still the step's own."""
    _, (backend,) = local(faults=Faults((Fault("offload.slow", "0", 150.0),)))
    backend.submit(0, *ple_tables.step(0))
    with pytest.raises(TimeoutError, match="rows of step 0 did not come"):
        backend.wait(0, time.monotonic() + 0.05)
    take(backend, source, 0)


def test_rows_whose_stamp_is_another_steps_are_refused(local):
    """The last net: whatever the messages said, the buffer itself says whose rows it holds."""
    _, (backend,) = local()
    for seq in (0, 1):
        backend.submit(seq, *ple_tables.step(seq))
        backend.wait(seq, soon())
        if seq == 0:
            backend.consumed(0)
    backend._memory.slots[1].stamps[ROWS_OF] = 3
    with pytest.raises(StaleRows, match=r"step 1 .* holds step 3"):
        backend.consumed(1)
    with pytest.raises(StaleRows):
        backend.submit(2, *ple_tables.step(2))


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Step(Kind.REQUEST, 0, 4, 1, 1), "step 4 was requested in slot|after step"),
        (Step(Kind.REQUEST, 7, 0, 1, 1), "in slot 7"),
        (Step(Kind.REQUEST, 0, 0, 65, 1), "65 tokens"),
        (Step(Kind.REQUEST, 0, 0, 1, 0), "0 requests"),
        (Step(Kind.REQUEST, 0, 0, 2**32 - 1, 2**32 - 1), "tokens"),
        (Step(Kind.READY, 0, 0, 1), "sent READY"),
        (Text(Kind.SERVING), "sent SERVING"),
        (Text(Kind.REGISTER, b"{}"), "sent REGISTER"),
    ],
    ids=str,
)
def test_a_request_outside_of_the_protocol_ends_the_process_with_a_sentence(
    local, request_, problem
):
    """Nothing that a rank says is trusted with an address."""
    server, (backend,) = local()
    if request_ == Step(Kind.REQUEST, 0, 4, 1, 1):
        for seq in (0, 1):
            backend.submit(seq, *ple_tables.step(seq))
            backend.wait(seq, soon())
            backend.consumed(seq)
    wire.send(server.sockets[0], request_)
    with pytest.raises(PleFailed, match=problem):
        backend.wait(9, soon())


@pytest.mark.parametrize("packet", [b"", b"\x00", b"\x09zzz", b"\x03short", b"\xff" * 64])
def test_bytes_that_are_no_message_are_refused(packet):
    """Whatever arrives, parsing ends in a message or in one named error."""
    with pytest.raises(ProtocolBroken):
        wire.parse(packet)


def test_messages_survive_the_wire():
    """What is packed is what is parsed, descriptor included."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    try:
        for message in (Step(Kind.REQUEST, 1, 2**40, 3, 4), Text(Kind.FATAL, b"why")):
            wire.send(ours, message)
            assert wire.receive(theirs) == (message, -1)
        wire.send(ours, Text(Kind.REGISTER, b"{}"), write)
        message, fd = wire.receive(theirs)
        os.write(fd, b"x")
        assert os.read(read, 1) == b"x"
        os.close(fd)
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs)
    finally:
        for fd in (read, write):
            os.close(fd)
        ours.close()
        theirs.close()


def good(shape: PleShape, **changes) -> dict:
    record = json.loads(Registration(0, 1, shape).pack())
    for key, value in changes.items():
        (record if key in record else record["shape"])[key] = value
    return record


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"protocol": 2}, "protocol"),
        ({"rank": 1}, "rank"),
        ({"rank": "0"}, "rank"),
        ({"ranks": 2}, "ranks"),
        ({"layers": ["layers.0"]}, "layers"),
        ({"layers": "layers.0"}, "shape"),
        ({"embed": 128}, "embed"),
        ({"ngram": 4}, "ngram"),
        ({"dtype": "float64"}, "shape"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"max_tokens": 0}, "shape"),
        ({"max_tokens": 1 << 40}, "shape"),
        ({"max_requests": True}, "shape"),
        ({"max_tokens": 32}, "memory"),
    ],
    ids=str,
)
def test_a_registration_that_does_not_fit_is_refused_by_field(source, shape, changes, field):
    """Layers, shapes, types, ranks, and the size of the memory that comes with it."""
    roster = Roster(1, source)
    size = Layout.of(shape).size

    def register() -> None:
        new = Registration.parse(json.dumps(good(shape, **changes)).encode(), 0)
        roster.add(0, new, size=size, needed=Layout.of(new.shape).size)

    with pytest.raises(RegistrationRefused) as refused:
        register()
    assert refused.value.field == field
    assert not roster.complete


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"rank": 0}', b"\xff\xfe"])
def test_a_registration_that_is_none_is_refused(raw):
    """Named by the socket it came over, since it names itself not."""
    with pytest.raises(RegistrationRefused, match="rank 3"):
        Registration.parse(raw, 3)


def test_ranks_register_once_and_alike(source, shape):
    """Twice the same rank, or two ranks of different sizes, would share buffers wrongly."""
    roster = Roster(2, source)
    size = Layout.of(shape).size
    roster.add(0, Registration(0, 2, shape), size=size, needed=size)
    with pytest.raises(RegistrationRefused, match="before"):
        roster.add(0, Registration(0, 2, shape), size=size, needed=size)
    other = PleShape.parse({**shape.describe(), "max_tokens": 32})
    with pytest.raises(RegistrationRefused, match="differs"):
        roster.add(1, Registration(1, 2, other), size=size, needed=size)
    assert not roster.complete
    roster.add(1, Registration(1, 2, shape), size=size, needed=size)
    assert roster.complete


def test_memory_that_could_be_cut_short_is_refused(source, shape, tmp_path):
    """An unsealed file of the right size: truncating it later would kill whoever maps it."""
    server = Local(source)
    path = tmp_path / "memory"
    path.write_bytes(bytes(Layout.of(shape).size))
    fd = os.open(path, os.O_RDWR)
    try:
        wire.send(server.sockets[0], Text(Kind.REGISTER, Registration(0, 1, shape).pack()), fd)
        message, _ = wire.receive(server.sockets[0])
        assert message.kind is Kind.FATAL
        assert b"sealed" in message.body
    finally:
        os.close(fd)
        server.close()


def test_ready_is_said_only_when_all_ranks_have_registered(source, shape):
    """One of two: its wait for the process to serve times out."""
    server = Local(source, ranks=2)
    first = OffloadBackend(server, shape, rank=0)
    try:
        with pytest.raises(TimeoutError, match="to serve"):
            first.serving(time.monotonic() + 0.1)
        second = OffloadBackend(server, shape, rank=1)
        first.serving(soon())
        second.serving(soon())
        second.close()
    finally:
        first.close()
        server.close()


def test_the_shared_memory_is_allocated_sealed_and_nameless(shape):
    """It cannot shrink, so no access is SIGBUS, and no file outlives the processes."""
    before = set(os.listdir("/dev/shm"))
    fd = allocate(shape)
    try:
        assert is_sealed(fd)
        facts = os.fstat(fd)
        assert facts.st_blocks * 512 >= facts.st_size == Layout.of(shape).size
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert {name for name in os.listdir("/dev/shm") if "ple" in name} <= before
    finally:
        os.close(fd)


def test_too_little_memory_is_a_named_error_before_anything_is_allocated(shape):
    """Not SIGBUS, not the OOM killer."""
    huge = PleShape.parse({**shape.describe(), "max_tokens": (1 << 31) - 1})
    with pytest.raises(NoRoom, match=r"no memory for the PLE buffers of one rank.*max_tokens"):
        allocate(huge)
    check_memory(1, "a byte")


@pytest.mark.process
@pytest.mark.slow
def test_an_allocation_that_fails_half_way_is_the_same_named_error(shape):
    """The kernel refuses the pages (here by a limit on file sizes), after the check had passed."""
    code = """
        import json, os, resource, sys
        from stallwatch_engine.ple.errors import NoRoom
        from stallwatch_engine.ple.offload.memory import allocate
        from stallwatch_engine.ple.shape import PleShape
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            allocate(PleShape.parse(json.loads(sys.argv[1])))
        except NoRoom as error:
            print(error, len(os.listdir("/proc/self/fd")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(shape.describe())],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "no memory for the PLE buffers" in done.stdout


@pytest.fixture
def offload(tables, shape, monkeypatch):
    """A real process with one rank, ended and reaped whatever happens."""
    with ExitStack() as stack:

        def make(faults="", folder=None):
            if faults:
                monkeypatch.setenv(SWITCH, "1")
                monkeypatch.setenv(VARIABLE, faults)
            process = start_offload(tables, folder)
            stack.callback(process.close)
            monkeypatch.delenv(VARIABLE, raising=False)
            backend = OffloadBackend(process, shape)
            stack.callback(backend.close)
            return process, backend

        yield make


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"),
    [("offload.kill@2", "SIGKILL"), ("offload.kill_before_ready@2", "SIGKILL")],
    ids=str,
)
def test_a_killed_process_is_a_failure_at_once_and_never_rows(offload, source, fault, status):
    """Also between its stores and the ready message: the rows are there, and nobody may read them."""
    process, backend = offload(fault)
    backend.serving(soon())
    for seq in range(2):
        backend.submit(seq, *ple_tables.step(seq))
        take(backend, source, seq)
    backend.submit(2, *ple_tables.step(2))
    began = time.monotonic()
    with pytest.raises(OffloadDied, match=status) as died:
        backend.wait(2, soon())
    assert died.value.pid == process.pid
    assert time.monotonic() - began < LIMIT_S / 2
    with pytest.raises(OffloadDied):
        backend.submit(3, *ple_tables.step(3))


@pytest.mark.process
@pytest.mark.slow
def test_a_stopped_process_is_a_timeout_and_right_rows_when_it_goes_on(offload, source):
    """SIGSTOP: not dead, so only the deadline speaks; and close() ends it although it is stopped."""
    process, backend = offload("offload.stop@0,offload.stop@1")
    backend.serving(soon())
    backend.submit(0, *ple_tables.step(0))
    with pytest.raises(TimeoutError, match="rows of step 0"):
        backend.wait(0, time.monotonic() + 0.3)
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    signal.pidfd_send_signal(process.pidfd, signal.SIGCONT)
    take(backend, source, 0)


@pytest.mark.process
@pytest.mark.slow
def test_a_stopped_process_is_killed_by_close_inside_its_steps(offload, monkeypatch):
    """Hanging up, then SIGTERM (pending while stopped), a step each, then SIGKILL; no descriptor is left."""
    assert process_module.STEP_S == 5.0
    monkeypatch.setattr(process_module, "STEP_S", 1.0)
    gc.collect()  # mappings of other tests
    before = len(os.listdir("/proc/self/fd"))
    process, backend = offload()
    backend.serving(soon())
    signal.pidfd_send_signal(process.pidfd, signal.SIGSTOP)
    began = time.monotonic()
    assert process.close() == "signal SIGKILL"
    assert 1.9 < time.monotonic() - began < 12
    backend.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert process.close() == "signal SIGKILL"


@pytest.mark.process
@pytest.mark.slow
def test_the_process_follows_its_parent_into_death(tables, shape):
    """The parent is killed, also while the child still loads: the child ends, too."""
    code = """
        import json, sys, time
        from stallwatch_engine.ple.offload.process import OffloadProcess
        process = OffloadProcess(
            "stallwatch_engine.ple.tables:open_resident", json.loads(sys.stdin.readline())
        )
        print(process.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        parent.stdin.write(json.dumps(tables.describe()) + "\n")
        parent.stdin.flush()
        child = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate(timeout=LIMIT_S)
    deadline = soon()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # a poll with a deadline


@pytest.mark.process
@pytest.mark.slow
def test_a_process_outlives_the_thread_that_started_it(tables, shape, source):
    """The kernel's parent-death signal follows the thread; one that ends early must not take it along."""
    started = []
    starter = threading.Thread(target=lambda: started.append(start_offload(tables)))
    starter.start()
    starter.join(LIMIT_S)
    (process,) = started
    backend = OffloadBackend(process, shape)
    try:
        backend.serving(soon())
        steps(backend, source, range(3))
    finally:
        backend.close()
        assert process.close() == "exit status 0"


@pytest.mark.process
@pytest.mark.slow
def test_a_rank_whose_layers_the_tables_do_not_have_is_told_so(tables, shape):
    """The sentence of the process reaches the worker; nothing is served."""
    process = start_offload(tables)
    other = PleShape.parse({**shape.describe(), "layers": ["layers.0", "layers.9"]})
    backend = OffloadBackend(process, other)
    try:
        with pytest.raises(PleFailed, match=r"registration of rank 0: layers"):
            backend.serving(soon())
    finally:
        backend.close()
        assert ended(process) == "exit status 1"


@pytest.mark.process
@pytest.mark.slow
def test_run_ahead_steps_through_a_real_process_with_its_lane_on_the_board(
    offload, source, tmp_path
):
    """300 staged steps, every row right; the lane offload:0/ple says what it did and whom it waits for."""
    with folder_in(tmp_path) as folder:
        process, backend = offload(folder=folder)
        board = attach(folder)
        reader = BoardReader(folder.path)
        backend.serving(soon())
        harness = Harness(backend, board)
        inputs = harness.staged_inputs()
        try:
            loaded = look(reader).lane("offload:0/ple").work
            harness.run(inputs, range(300))
            harness.finish()
            for seq in range(300):
                expected = ple_tables.rows_of(source, backend.shape, seq)
                assert torch.equal(harness.rows[seq], expected)
            image = look(reader)
            ple = image.lane("offload:0/ple")
            assert ple.wait_on == "worker:0/ple-request"
            tokens = sum(len(ple_tables.step(seq)[0]) for seq in range(300))
            assert loaded > 0  # bytes of tables
            assert ple.work == loaded + tokens
            offload_process = next(p for p in image.processes if p.role == "offload")
            assert offload_process.ready
            assert offload_process.pid == process.pid
        finally:
            harness.close(inputs)
            reader.close()
            board.close()


@pytest.fixture
def two_ranks(tables, shape):
    """A real process that serves two ranks, and what both have registered with; ended whatever happens."""
    with ExitStack() as stack:

        def make(faults: Faults | None = None):
            process = start_offload(tables, ranks=2)
            stack.callback(process.close)
            backends = [
                OffloadBackend(process, shape, rank=rank, faults=faults) for rank in range(2)
            ]
            for backend in backends:
                stack.callback(backend.close)
            for backend in backends:
                backend.serving(soon())
            return process, backends

        yield make


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_register_with_one_process_and_both_are_served(two_ranks, source):
    """Each in memory of its own, with the right rows; the second rank reads them at once, early or a step later."""
    process, (lead, other) = two_ranks()
    behind: list[int] = []
    for seq in range(40):
        first, second = (lead, other) if seq % 2 else (other, lead)
        first.submit(seq, *ple_tables.step(seq))
        second.submit(seq, *ple_tables.step(seq))
        behind.append(seq)
        if seq % 3 == 0:
            take(other, source, behind.pop(0))
        take(lead, source, seq)
        while len(behind) > seq % 2:
            take(other, source, behind.pop(0))
    assert lead.buffer(0).data_ptr() != other.buffer(0).data_ptr()
    assert process.status() == "running"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_request_from_either_of_two_ranks_ends_the_process_and_both_are_told(
    two_ranks, source, rank
):
    """The leader asks twice for a step, or the other one asks at all: no rank gets rows that may be stale."""
    process, backends = two_ranks(
        Faults((Fault("offload.double_request", "1"),)) if not rank else None
    )
    for backend in backends:
        backend.submit(0, *ple_tables.step(0))
    for backend in backends:
        take(backend, source, 0)
    if rank:
        wire.send(process.sockets[1], Step(Kind.REQUEST, 1, 1, 1, 1))
    why = "rank 1 sent REQUEST" if rank else "ProtocolBroken"
    with pytest.raises(PleFailed, match=why):
        steps(backends[0], source, range(1, 4))
    with pytest.raises(PleFailed, match=why):
        steps(backends[1], source, range(1, 4))
    assert ended(process) == "exit status 1"


def test_a_factory_from_elsewhere_is_refused(monkeypatch):
    """The command line names a function of ours; another module is only for tests."""
    from stallwatch_engine.ple.offload.main import factory

    monkeypatch.delenv(SWITCH, raising=False)
    with pytest.raises(ValueError, match="stallwatch_engine alone"):
        factory("os:system")


def test_a_hang_up_before_registration_is_a_death(source, shape):
    """A process that is gone when a rank registers fails the constructor, with its status."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    gone = SimpleNamespace(
        sockets=[ours], pid=1, pidfd=ours.fileno(), status=lambda: "exit status 3"
    )
    with pytest.raises(OffloadDied, match="exit status 3"):
        OffloadBackend(gone, shape)
    ours.close()


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("heard", ["waiting", "submitting"])
def test_why_the_process_gave_up_is_told_however_its_socket_ended(shape, unread, heard):
    """Its sentence is in the socket: neither a failed send nor a reset by what it left unread may hide it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = SimpleNamespace(
        sockets=[ours], pid=1, pidfd=os.eventfd(0), status=lambda: "exit status 1"
    )
    backend = OffloadBackend(process, shape)
    try:
        if not unread:
            os.close(wire.receive(theirs)[1])
        wire.send(theirs, Text(Kind.FATAL, b"the tables are wet"))
        theirs.close()
        with pytest.raises(PleFailed, match="gave up: the tables are wet"):
            backend.serving(soon()) if heard == "waiting" else backend.submit(
                0, *ple_tables.step(0)
            )
        with pytest.raises(PleFailed, match="gave up: the tables are wet"):
            backend.wait(0, soon())
    finally:
        backend.close()
        ours.close()
        os.close(process.pidfd)
