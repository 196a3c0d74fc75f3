"""Resident, process and disk: one interface, the same bits, and nobody's rows but the step's own."""

from __future__ import annotations

import time

import pytest
import torch

import ple_tables
from ple_cycle import start_offload
from stallwatch.heartbeat import Board
from stallwatch_engine.ple.disk.rows import open_disk
from stallwatch_engine.ple.errors import OutOfOrder, PleFailed
from stallwatch_engine.ple.offload.client import OffloadBackend
from stallwatch_engine.ple.resident import ResidentBackend
from stallwatch_engine.ple.tables import load
from stallwatch_engine.streams.errors import OverContract
from stallwatch_kernels.ple.table import Format

LIMIT_S = 60.0


def lane():
    return Board(None, "worker", 0, 0).lane("ple")


def soon() -> float:
    return time.monotonic() + LIMIT_S


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def mixed(request, tmp_path_factory):
    """One layer of each stored format."""
    folder = tmp_path_factory.mktemp("tables")
    return ple_tables.spec(folder, *Format, dtype=request.param), folder


@pytest.mark.slow
@pytest.mark.process
def test_all_backends_give_the_same_bits_for_every_format(mixed):
    """Including end tokens, placeholders (-1), parts with different factors and steps of many requests."""
    spec, folder = mixed
    shape = ple_tables.shape(spec)
    process = start_offload(spec)
    disk = open_disk(spec, folder / "disk", lane())
    offload = OffloadBackend(process, shape)
    resident = ResidentBackend(load(spec, lane()), shape)
    backends = [resident, ResidentBackend(disk, shape), offload]
    try:
        offload.serving(soon())
        for seq in range(20):
            inputs = ple_tables.step(seq)
            found = []
            for backend in backends:
                backend.submit(seq, *inputs)
                rows = backend.wait(seq, soon())
                found.append(rows.clone())
                rows.fill_(torch.nan)
                backend.consumed(seq)
            assert found[0].shape == (6, len(inputs[0]), 256)
            assert found[0].dtype == shape.torch_dtype
            assert not found[0].isnan().any()
            for other in found[1:]:
                assert torch.equal(found[0], other)
    finally:
        for backend in backends:
            backend.close()
        disk.close()
        assert process.close() == "exit status 0"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return ple_tables.spec(tmp_path_factory.mktemp("fp32"))


@pytest.fixture
def resident(tables):
    backend = ResidentBackend(load(tables, lane()), ple_tables.shape(tables))
    yield backend
    backend.close()


def test_every_step_gets_rows_of_its_own(resident, tables):
    """Two in flight: the second's rows do not touch the first's."""
    source, shape = load(tables, lane()), resident.shape
    for seq in range(0, 20, 2):
        for one in (seq, seq + 1):
            resident.submit(one, *ple_tables.step(one))
        for one in (seq, seq + 1):
            rows = resident.wait(one, soon())
            assert torch.equal(rows, ple_tables.rows_of(source, shape, one))
        for one in (seq, seq + 1):
            resident.consumed(one)


def test_a_step_over_the_contract_raises_and_changes_nothing(resident):
    """The third of two; afterwards the first two are still right."""
    for seq in (0, 1):
        resident.submit(seq, *ple_tables.step(seq))
    with pytest.raises(OverContract):
        resident.submit(2, *ple_tables.step(2))
    resident.wait(0, soon())
    resident.consumed(0)
    resident.submit(2, *ple_tables.step(2))


def test_misuse_is_refused_by_name(resident):
    """Twice the same step, a gap, rows taken twice, consumed before taken."""
    resident.submit(0, *ple_tables.step(0))
    for seq in (0, 2):
        with pytest.raises(OutOfOrder):
            resident.submit(seq, *ple_tables.step(seq))
    with pytest.raises(OutOfOrder, match="never handed out"):
        resident.consumed(0)
    resident.wait(0, soon())
    with pytest.raises(OutOfOrder, match="handed out before"):
        resident.wait(0, soon())


def test_a_wait_for_what_nobody_asked_for_says_so(resident):
    """The sentence tells a lost request from a slow table."""
    with pytest.raises(TimeoutError, match=r"step 0 did not come .* nobody has asked"):
        resident.wait(0, time.monotonic() + 0.05)


def test_a_failed_request_thread_ends_the_waits(resident):
    """fail() is how a forward learns that its rows will never be asked for."""
    resident.fail(RuntimeError("the request thread ended"))
    with pytest.raises(PleFailed, match="the request thread ended"):
        resident.wait(0, soon())
    with pytest.raises(PleFailed):
        resident.submit(0, *ple_tables.step(0))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda i, s, c: (i.long(), s, c), "ids is torch.int64"),
        (lambda i, s, c: (i[:0], s, c), "0 tokens"),
        (lambda i, s, c: (i.repeat(100), s, c), "tokens; expected 1 to 64"),
        (lambda i, s, c: (i, s[:1], c[:0]), "0 requests"),
        (lambda i, s, c: (i, s, c[:, :1]), "context is"),
        (lambda i, s, c: (i, s, c.repeat(2, 1)), r"context is \("),
    ],
)
def test_a_step_that_contradicts_itself_is_refused_before_anything_happens(
    resident, change, problem
):
    """Afterwards the same number still works."""
    inputs = ple_tables.step(0)
    with pytest.raises(ValueError, match=problem):
        resident.submit(0, *change(*inputs))
    resident.submit(0, *inputs)


def test_tables_that_do_not_fit_the_model_are_refused(tables):
    """Other layers, another width."""
    shape = ple_tables.shape(tables)
    source = load(tables, lane())
    source.layers = ("other",)
    with pytest.raises(ValueError, match="layers is"):
        ResidentBackend(source, shape)
