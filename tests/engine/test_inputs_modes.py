"""MRV1, MRV2 and the old shared event, driven by a host that runs ahead."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import ple_tables
from heartbeat_helpers import attach, folder_in, look
from ple_cycle import CYCLE, FIXTURE, Harness, edges, start_offload, until_cycle
from stallwatch.board.reader import BoardReader
from stallwatch.diagnosis import graph
from stallwatch.heartbeat import Board
from stallwatch.testing.snapshots import facts, snapshot
from stallwatch_engine.faults import Fault, Faults, FaultsRefused
from stallwatch_engine.inputs.mirrored import MirroredInputs
from stallwatch_engine.inputs.shared_event import SharedEventInputs
from stallwatch_engine.inputs.step import HostSlot, StaleInputs, StepInputs
from stallwatch_engine.ple.offload.client import OffloadBackend
from stallwatch_engine.ple.resident import ResidentBackend
from stallwatch_engine.ple.tables import load
from stallwatch_engine.streams.errors import OverContract, StreamFailed
from stallwatch_engine.streams.threaded import ThreadedEvent

LIMIT_S = 60.0


def quiet() -> Board:
    return Board(None, "worker", 0, 0)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return ple_tables.spec(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def source(tables):
    return load(tables, quiet().lane("load"))


@pytest.fixture
def rig(source, tables):
    """Harnesses over a resident backend, taken apart whatever state they end in."""
    made = []

    def make(mode: str, *, bound_s=20.0, **options):
        harness = Harness(
            ResidentBackend(source, ple_tables.shape(tables)), quiet(), bound_s=bound_s
        )
        inputs = getattr(harness, f"{mode}_inputs")(**options)
        made.append((harness, inputs))
        return harness, inputs

    yield make
    for harness, inputs in made:
        harness.close(inputs)


def assert_right(harness: Harness, source, steps: range) -> None:
    for seq in steps:
        expected = ple_tables.rows_of(source, harness.backend.shape, seq)
        assert torch.equal(harness.rows[seq], expected), f"step {seq}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["staged", "shared"])
def test_a_thousand_run_ahead_steps_with_staged_inputs_and_not_one_with_a_shared_event(
    rig, source, mode
):
    """The same program: bound to its own event each step gets its own rows; with one event none does."""
    harness, inputs = rig(mode, bound_s=20.0 if mode == "staged" else 0.3)
    if mode == "staged":
        harness.run(inputs, range(1000))
        harness.finish()
        assert_right(harness, source, range(1000))
    else:
        with pytest.raises((StreamFailed, TimeoutError, RuntimeError)):
            harness.run(inputs, range(1000))
        assert harness.rows == {}


@pytest.mark.slow
def test_the_shared_event_stalls_inside_its_bound_in_every_run(source, tables):
    """Ten of ten: a pure matter of order, so nothing has to be lucky."""
    for _ in range(10):
        bound_s = 0.2
        harness = Harness(
            ResidentBackend(source, ple_tables.shape(tables)), quiet(), bound_s=bound_s
        )
        inputs = harness.shared_inputs()
        try:
            harness.run(inputs, range(2))
            began = time.monotonic()
            with pytest.raises(StreamFailed, match="ple_wait failed"):
                harness.finish()
            assert time.monotonic() - began < bound_s * 2
            assert harness.rows == {}
        finally:
            harness.close(inputs)


@pytest.mark.slow
@pytest.mark.process
def test_the_stall_shows_exactly_the_three_edges_of_the_circle(tables, tmp_path):
    """model -> offload -> ple-request -> model, with a real offload process, on a real board."""
    with folder_in(tmp_path) as folder:
        process, board = start_offload(tables, folder), attach(folder)
        backend = OffloadBackend(process, ple_tables.shape(tables))
        reader = BoardReader(folder.path)
        try:
            backend.serving(time.monotonic() + LIMIT_S)
            harness = Harness(backend, board, bound_s=LIMIT_S)
            inputs = harness.shared_inputs()
            try:
                harness.run(inputs, range(2))
                assert until_cycle(reader) == CYCLE
            finally:
                harness.close(inputs)
        finally:
            reader.close()
            backend.close()
            process.close()
            board.close()


def test_the_committed_snapshot_holds_that_circle():
    """The fixture that a diagnosis must name is a board that this reader reads."""
    reader = BoardReader(FIXTURE)
    try:
        image = look(reader)
    finally:
        reader.close()
    assert edges(image) == CYCLE
    assert image.problems == ()
    procs = [facts(one.pid, start_ticks=one.start_ticks) for one in image.processes]
    seen = snapshot(image.taken_ns / 1e9, image.lanes, processes=image.processes, procs=procs)
    found = graph.edges(seen)
    assert all(edge.why != graph.IDLE for edge in found)
    (circle,) = graph.cycles(found)
    assert set(circle) == {waiter for waiter, _ in CYCLE}


def test_mirrored_inputs_give_the_right_rows_one_step_at_a_time(rig, source):
    """MRV1 owns host copies; nothing runs ahead, so the queue of one is never over its contract."""
    harness, inputs = rig("mirrored")
    for seq in range(50):
        harness.run(inputs, range(seq, seq + 1))
        harness.finish()
    assert_right(harness, source, range(50))


@pytest.mark.parametrize("mode", ["staged", "mirrored"])
def test_shapes_that_change_from_step_to_step_keep_their_own_rows(rig, source, mode):
    """C4 3 2 1 2 3 4 1 twice: adjacent steps of different shapes are where the shared event was moved."""
    shapes = [4, 3, 2, 1, 2, 3, 4, 1] * 2

    def step(seq: int):
        return ple_tables.step(seq, tokens=shapes[seq], requests=shapes[seq])

    harness, inputs = rig(mode)
    if mode == "staged":
        harness.run(inputs, range(16), step)
    else:
        for seq in range(16):
            harness.run(inputs, range(seq, seq + 1), step)
            harness.finish()
    harness.finish()
    for seq in range(16):
        expected = torch.empty(2, shapes[seq], 256)
        source.gather(*step(seq), expected)
        assert torch.equal(harness.rows[seq], expected)


def test_mirrored_inputs_queue_one_step_and_refuse_the_next(source, tables):
    """One is in the backend's hands, one is queued, and one more raises instead of blocking."""
    gate, taken = threading.Event(), threading.Event()

    class Slow(ResidentBackend):
        def submit(self, *step):
            taken.set()
            gate.wait(LIMIT_S)
            super().submit(*step)

    backend = Slow(source, ple_tables.shape(tables))
    inputs = MirroredInputs(backend, make_lane=lambda: quiet().lane("ple-request"))
    inputs.stage(StepInputs(0, *ple_tables.step(0)))
    assert taken.wait(LIMIT_S)
    inputs.stage(StepInputs(1, *ple_tables.step(1)))
    with pytest.raises(OverContract, match="1 at a time"):
        inputs.stage(StepInputs(2, *ple_tables.step(2)))
    gate.set()
    assert backend.wait(0, time.monotonic() + LIMIT_S).shape[1] == len(ple_tables.step(0)[0])
    inputs.close(LIMIT_S)


def test_one_batch_over_the_contract_raises_and_leaves_no_trace(rig, source):
    """The third of two is refused before anything is enqueued; the two end well."""
    harness, inputs = rig("staged")
    gate = threading.Event()
    harness.model.enqueue("gate", lambda: gate.wait(LIMIT_S))
    harness.run(inputs, range(2))
    for _ in range(3):
        with pytest.raises(OverContract, match="2 at a time"):
            inputs.stage(StepInputs(2, *ple_tables.step(2)))
    gate.set()
    harness.finish()
    assert_right(harness, source, range(2))
    harness.run(inputs, range(2, 4))
    harness.finish()
    assert_right(harness, source, range(2, 4))


def test_an_input_event_that_never_completes_is_an_explicit_failure(rig):
    """The request thread names the copy; the forward's wait ends with it, not at its own deadline."""
    faults = Faults((Fault("event.never", "inputs"),))
    harness, inputs = rig("staged", faults=faults, timeout_s=0.2)
    began = time.monotonic()
    harness.run(inputs, range(1))
    with pytest.raises(StreamFailed, match="no PLE rows will come: copying the inputs of step 0"):
        harness.finish()
    assert time.monotonic() - began < harness.bound_s
    with pytest.raises(RuntimeError, match="copying the inputs of step 0"):
        inputs.stage(StepInputs(1, *ple_tables.step(1)))
    assert harness.rows == {}


def test_a_late_input_event_gives_the_right_rows(rig, source):
    """Late is not never."""
    harness, inputs = rig("staged", faults=Faults((Fault("event.late", "inputs", 15.0),)))
    harness.run(inputs, range(8))
    harness.finish()
    assert_right(harness, source, range(8))


def test_an_input_event_that_completes_too_early_never_gives_another_steps_rows(rig):
    """The stamp behind the copies says whose inputs the buffer holds."""
    harness, inputs = rig("staged", bound_s=5.0, faults=Faults((Fault("event.wrong", "inputs"),)))
    gate = threading.Event()
    harness.model.enqueue("gate", lambda: gate.wait(LIMIT_S))
    harness.run(inputs, range(1))
    with pytest.raises(RuntimeError, match="said to be copied"):
        _until_raises(lambda: inputs.stage(StepInputs(9, *ple_tables.step(9))))
    gate.set()
    with pytest.raises(StreamFailed):
        harness.finish()
    assert harness.rows == {}


def _until_raises(deed, seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            deed()
        except OverContract:
            pass
        time.sleep(0.01)  # a poll with a deadline


def test_the_host_slot_knows_whose_inputs_it_holds(tables):
    """Asked for another step than the one that was filled in, it refuses."""
    slot = HostSlot(ple_tables.shape(tables))
    with pytest.raises(StaleInputs):
        slot.view(0, 1, 1)
    inputs = ple_tables.step(3)
    slot.fill(StepInputs(3, *inputs))
    held = slot.view(3, len(inputs[0]), len(inputs[2]))
    assert torch.equal(held.ids, inputs[0])
    assert torch.equal(held.context, inputs[2])
    with pytest.raises(StaleInputs, match=r"step 4 .* step 3"):
        slot.view(4, 1, 1)


def test_the_shared_event_needs_the_explicit_fault(source, tables):
    """Nobody gets the old mode by accident."""
    backend = ResidentBackend(source, ple_tables.shape(tables))
    with pytest.raises(FaultsRefused, match="deadlocks"):
        SharedEventInputs(
            backend,
            (None, None),
            ThreadedEvent,
            faults=Faults(),
            timeout_s=1.0,
            make_lane=lambda: quiet().lane("ple-request"),
        )
