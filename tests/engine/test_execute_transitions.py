"""Requests that come and go between steps: every transition of shapes, every backend, both runners."""

from __future__ import annotations

import random

import pytest
import torch

from engine_rig import Rig, rig, sha
from ple_ranks import register_two
from stallwatch_engine.checkpoint.tiny import make_tiny
from stallwatch_engine.execute.coverage import Coverage
from stallwatch_engine.faults import Fault, Faults
from stallwatch_engine.schedule.request import Finish
from stallwatch_kernels import jit, warmup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first one compiles
PHASES = (4, 3, 2, 1, 2, 3, 4, 1) * 2
STEPS_A_PHASE = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path / "tiny")
    return path / "tiny"


class Crowd:
    """Keeps a wanted number of requests running: joins to grow, ends the oldest to shrink."""

    def __init__(self, engine: Rig) -> None:
        self.engine = engine
        self.prompts: dict[str, list[int]] = {}
        self.live: list[str] = []
        self._chance = random.Random(11)

    def resize(self, wanted: int) -> None:
        while len(self.live) > wanted:
            self.engine.scheduler.end(self.live.pop(0), Finish.ABORT)
        while len(self.live) < wanted:
            name = f"r{len(self.prompts)}"
            length = self._chance.choice((1, 2, 7, 23, 41))
            self.prompts[name] = [self._chance.randrange(256) for _ in range(length)]
            self.engine.add(name, self.prompts[name], 900)
            self.live.append(name)

    def phase(self, wanted: int) -> bool:
        """Some steps at that size; whether steps of exactly that decode shape ran."""
        self.resize(wanted)
        met = 0
        for _ in range(60):
            if self.engine.step():
                met += self.engine.shapes[-1] == (wanted, wanted)
            else:
                self.engine.retire()
            if met == STEPS_A_PHASE:
                return True
        return False


@pytest.mark.process
@pytest.mark.parametrize("backend", ["resident", "process", "disk"])
@pytest.mark.parametrize("runner", ["mrv1", "mrv2"])
def test_transitions_of_shapes_change_no_token(folder, tmp_path, backend, runner):
    """C4 3 2 1 2 3 4 1 twice with joins and aborts: 16 of 16, the tokens and logits of each request alone,
    nothing compiled on the way, and every static buffer where it was."""
    tables = str(tmp_path / "tables") if backend == "disk" else None
    with rig(
        folder, runner=runner, ple_backend=backend, ple_folder=tables, max_num_seqs=4
    ) as engine:
        signatures, addresses = jit.signatures(), engine.addresses()
        crowd = Crowd(engine)
        assert [crowd.phase(wanted) for wanted in PHASES] == [True] * 16
        crowd.resize(0)
        engine.drain()
        produced = {name: engine.tokens.get(name, []) for name in crowd.prompts}
        assert sum(map(len, produced.values())) > 100
        for name, tokens in produced.items():
            alone, logits = engine.alone(crowd.prompts[name], max(1, len(tokens)))
            assert sha(tokens) == sha(alone[: len(tokens)])
            for mine, its in zip(engine.logits.get(name, []), logits, strict=False):
                assert torch.equal(mine, its)
        assert warmup.grown(signatures, jit.signatures()) == {}
        assert engine.addresses() == addresses
        assert engine.executor.coverage.complete
        assert not engine.executor.coverage.missed
        load = engine.scheduler.load
        assert load.free_pages == engine.built.limits.pages
        assert load.free_slots == engine.built.limits.slots


def test_a_shape_that_was_not_prepared_is_found_out(folder):
    """Without C3 in the warm-up: 7 of 8, and every step of three is counted as unprepared."""
    with rig(folder, shapes=(1, 2, 4, 5, 6, 7, 8)) as engine:
        coverage = engine.executor.coverage
        assert coverage.decode == (7, 8)
        assert not coverage.complete
        assert "7/8" in str(coverage)
        assert "C3" in str(coverage)
        crowd = Crowd(engine)
        for wanted in (4, 3, 2):
            assert crowd.phase(wanted)
        crowd.resize(0)
        engine.drain()
        assert set(coverage.missed) == {"C3"}


def test_coverage_on_a_cpu_claims_no_graphs():
    """What was never captured is not reported as captured."""
    assert "graph=none, captured=0" in str(Coverage.up_to(2))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_aborts_at_every_depth_leave_nothing_to_the_next_request(folder, depth):
    """Slots and pages of a request aborted with 1, 2, 3 steps in flight go to the next one at once, in a pool
    that has nothing else to give, and every state is NaN behind the last of those steps: the next one's logits
    are those of an engine that never saw the other."""
    chance = random.Random(depth)
    first = [chance.randrange(256) for _ in range(50)]
    second = [chance.randrange(256) for _ in range(33)]
    with rig(
        folder, max_num_seqs=1, max_model_len=64, kv_tokens=64, max_concurrent_batches=depth
    ) as engine:
        tokens, logits = engine.alone(second, 8)
        for number in range(4):
            engine.add(("first", number), first, 14)
            for _ in range(depth):
                engine.step()
            assert len(engine.plans) == depth
            engine.scheduler.end(("first", number), Finish.ABORT)
            engine.executor._streams.model.enqueue("canary", lambda: put_canaries(engine))
            engine.add(("second", number), second, 8)
            engine.drain()
            assert engine.tokens["second", number] == tokens
            assert torch.equal(torch.stack(engine.logits["second", number]), logits)


def put_canaries(engine: Rig) -> None:
    """In every page, slot and row of ids that a request can own."""
    stores = engine.built.stores
    for store in (*stores._by_page, *stores._by_slot):
        store.fill_(torch.nan)
    stores.context.ids.fill_(77)


@pytest.mark.parametrize(
    ("kv_dtype", "seqs", "chunked"),
    [
        (kv_dtype, seqs, chunked)
        for kv_dtype in ("float32", "bfloat16", "fp8_e4m3")
        for seqs in (1, 3, 8)
        for chunked in (True, False)
    ],
)
def test_no_setting_binds_the_engine(folder, tmp_path, kv_dtype, seqs, chunked):  # noqa: PLR0917
    """A renamed model, any KV type, any number of sequences, chunks or none: batches do not change tokens."""
    renamed = tmp_path / "another-name"
    renamed.symlink_to(folder)
    chance = random.Random(seqs)
    asked = {n: [chance.randrange(256) for _ in range(5 + 17 * n)] for n in range(5)}
    with rig(
        renamed,
        kv_dtype=kv_dtype,
        max_num_seqs=seqs,
        chunked_prefill=chunked,
        max_batched_tokens=32,
        max_model_len=128,
    ) as engine:
        for name, prompt in asked.items():
            engine.add(name, prompt, 6)
        engine.drain()
        for name, prompt in asked.items():
            assert engine.tokens[name] == engine.alone(prompt, 6)[0]


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kv_dtype", "seqs", "chunked"),
    [("float32", 1, True), ("bfloat16", 3, False), ("fp8_e4m3", 8, True)],
)
def test_the_number_of_registered_ranks_binds_nothing(  # noqa: PLR0917
    folder, tmp_path, monkeypatch, kv_dtype, seqs, chunked, ranks
):
    """The tables in a process with one or two ranks: the resident engine's tokens, and each rank all rows."""
    renamed = tmp_path / "another-name"
    renamed.symlink_to(folder)
    chance = random.Random(seqs)
    asked = {n: [chance.randrange(256) for _ in range(5 + 17 * n)] for n in range(4)}
    options = {
        "kv_dtype": kv_dtype,
        "max_num_seqs": seqs,
        "chunked_prefill": chunked,
        "max_batched_tokens": 32,
        "max_model_len": 128,
    }
    with rig(folder, **options) as engine:
        alone = {name: engine.alone(prompt, 6)[0] for name, prompt in asked.items()}
    if ranks == 2:
        register_two(monkeypatch)
    with rig(renamed, ple_backend="process", **options) as engine:
        for name, prompt in asked.items():
            engine.add(name, prompt, 6)
        engine.drain()
        backend = engine.executor._backend
        if ranks == 2:
            backend.follower.end()
            assert backend.follower.error is None
            assert len(backend.rows) == len(engine.shapes)
            assert backend.follower.rows.keys() == backend.rows.keys()
            for seq, rows in backend.rows.items():
                assert torch.equal(backend.follower.rows[seq], rows)
        assert engine.tokens == alone


def test_threads_change_no_bit(folder):
    """Rows and columns over two threads: the logits of one thread."""
    prompt = list(range(3, 60))
    with rig(folder, max_num_seqs=2) as engine:
        tokens, logits = engine.alone(prompt, 8)
    with rig(folder, max_num_seqs=2, threads=2) as engine:
        found = engine.alone(prompt, 8)
    torch.set_num_threads(1)
    assert found[0] == tokens
    assert torch.equal(found[1], logits)


def test_bfloat16_serves(folder):
    """In bfloat16 the same prompts end; a row's bits may depend on its batch there, and nothing is claimed."""
    with rig(folder, dtype="bfloat16", max_num_seqs=3) as engine:
        for name in range(4):
            engine.add(name, range(3 + name), 5)
        engine.drain()
        assert [len(engine.tokens[name]) for name in range(4)] == [5] * 4


def test_warm_up_needs_no_room(folder):
    """Pages for one short request and shapes of eight: everything is prepared, and requests take turns."""
    with rig(folder, max_num_seqs=8, max_model_len=16, kv_tokens=16) as engine:
        assert engine.built.limits.pages == 1
        assert engine.executor.coverage.complete
        for name in range(3):
            engine.add(name, range(1, 7), 4)
        engine.drain()
        assert [len(engine.tokens[name]) for name in range(3)] == [4] * 3


def test_an_output_that_never_comes_is_an_error_in_time(folder):
    """The step's event never completes: TimeoutError that names it, 50 ms after its limit at the latest."""
    import time

    limit = 0.4
    faults = Faults((Fault("event.never", "output"),))
    with rig(folder, step_timeout=limit, faults=faults, max_num_seqs=1) as engine:
        engine.add("r", [1, 2, 3], 1)
        engine.step()
        engine.executor.synchronize(30.0)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="output of step 0"):
            engine.retire()
        assert time.monotonic() - began <= limit + 0.05


def test_one_step_over_the_contract_raises(folder):
    """A third step of two is refused by the executor itself, whoever planned it."""
    from stallwatch_engine.streams.errors import OverContract

    with rig(folder, max_num_seqs=1) as engine:
        gate = _Gate(engine)
        engine.add("r", [1, 2, 3], 8)
        assert engine.step()
        assert engine.step()
        object.__setattr__(engine.scheduler.limits, "max_in_flight", 3)
        plan = engine.scheduler.schedule()
        assert plan is not None
        with pytest.raises(OverContract):
            engine.executor.launch(plan)
        gate.open()


class _Gate:
    """Holds the model stream."""

    def __init__(self, engine: Rig) -> None:
        import threading

        self._event = threading.Event()
        engine.executor._streams.model.enqueue("gate", lambda: self._event.wait(30))

    def open(self) -> None:
        self._event.set()
