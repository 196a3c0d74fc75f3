"""Each kind from a hand-built case, and the traps beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.board.image import LaneClass, PauseLease, PhaseFrame
from stallwatch.diagnosis.classify import diagnose, refine
from stallwatch.diagnosis.kinds import KINDS, Kind
from stallwatch.diagnosis.verdict import Verdict
from stallwatch.diagnosis.vocabulary import DEFAULT
from stallwatch.evidence.model import Rung
from stallwatch.testing.cases import NOW, Build, Member, finding, frames, stack
from stallwatch.watch.finding import Rule, Subject
from stallwatch.watch.policy import S
from stallwatch.watch.snapshot import Recall

WAIT, IDLE, START = LaneClass.WAIT, LaneClass.IDLE, LaneClass.START
WORKERS, CORE = "worker:*/main", "core:*/main"
DEVICE = ("synchronize@torch/cuda/streams.py:224", "run_kernel")


def engine(*, ranks: int = 1, ready: bool = True) -> tuple[Build, Member, Member, list[Member]]:
    """api:0 turning, core:0 and its workers without lanes yet."""
    build = Build(ready=ready)
    api = build.member(10, "api", pending=2)
    core = build.member(
        20, "core", stacks=(stack(20, "wait@shm_broadcast.py:200", "step@core.py:9"),)
    )
    workers = [build.member(30 + 10 * n, "worker", n) for n in range(ranks)]
    build.lane(api, "loop", "loop", age=0.05, moved=True)
    return build, api, core, workers


def waiting_core(build: Build, core: Member, *, age: float = 61) -> object:
    step = PhaseFrame("step", LaneClass.WORK, NOW - int(age * S), NOW - int(age * S), 0)
    return build.lane(core, "main", "wait_worker", cls=WAIT, on=WORKERS, age=age, outer=step)


def test_a_worker_asleep_in_a_c_call_is_not_named_from_its_wait_alone() -> None:
    """S, no CPU, GIL free, a device phase: a lock would look the same, so UNKNOWN_STALL first."""
    build, _, core, (worker,) = engine()
    worker.stacks = (stack(30, "run_kernel", "call@stallwatch_engine/phasemap.py:1", "forward"),)
    waiting_core(build, core)
    lane = build.lane(worker, "main", "execute_model", on="")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.confidence) == (Kind.UNKNOWN_STALL, "low")
    assert verdict.kinds == (Kind.UNKNOWN_STALL, Kind.DEVICE_WAIT)
    assert any("only native frames could tell" in r for r in verdict.reasons)
    assert verdict.culprit.lane == "worker:0/main"
    assert verdict.culprit.frame == "run_kernel (model.py:42)"
    assert "worker:0 (pid 30) has been in execute_model" in verdict.summary
    assert "61.0 s (limit 60 s)" in verdict.summary


@pytest.mark.parametrize(
    "frame",
    ["synchronize@torch/cuda/streams.py:224", "relu@torch/nn/functional.py:3", "Event.item@x.py:1"],
)
def test_a_device_call_in_the_innermost_frame_is_a_device_wait(frame: str) -> None:
    """A frame under torch/ or one named like a wait for the device says it: DEVICE_WAIT, medium."""
    build, _, _, (worker,) = engine()
    worker.stacks = (stack(30, "call@torch/utils/_contextlib.py:1", frame, "forward"),)
    lane = build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.confidence) == (Kind.DEVICE_WAIT, "medium")


def test_a_compilers_lock_under_torch_is_no_device_call() -> None:
    """`with compile_lock` in torch/_dynamo has no frame of its own: UNKNOWN_STALL."""
    build, _, _, (worker,) = engine()
    worker.stacks = (stack(30, "convert@torch/_dynamo/convert_frame.py:9", "forward"),)
    lane = build.lane(worker, "main", "execute_model")
    assert diagnose(build.case(build.late(lane))).kind is Kind.UNKNOWN_STALL


def native(build: Build, *names: str) -> tuple[Verdict, Verdict]:
    """The first verdict, and the final one after a native look at the same worker showed `names`."""
    (worker,) = (m for m in build.members if m.role == "worker")
    worker.stacks = (stack(30, "run_kernel"),)
    lane = build.lane(worker, "main", "execute_model")
    case = build.case(build.late(lane))
    first = diagnose(case)
    rung = Rung.NATIVE if names else Rung.PROC
    threads = (stack(30, *names, "run_kernel"),) if names else ()
    look = replace(case.stacks[30], rung=rung, threads=threads, problems=("refused",))
    after = ({30: look}, {30: case.stacks[30]})
    return first, refine(first, diagnose(replace(case, later=after)))


@pytest.mark.parametrize(
    "names",
    [
        ("0x7f@libc.so.6:0", "ffi_call@libffi.so.8.1.2:0", "f@Modules/_ctypes/callproc.c:9"),
        ("0x7f@/usr/lib/libc.so.6:0", "0x7e@/usr/lib/libcuda.so.1:0"),
        ("0x7f@/usr/lib/libc.so.6:0", "0x7e@/opt/rocm/lib/librccl.so.1:0"),
        ("__GI___ioctl@/usr/lib/libc.so.6:0", "0x1@/usr/bin/python3.11:0"),
    ],
)
def test_native_frames_of_a_library_end_as_a_device_wait(names: tuple[str, ...]) -> None:
    """UNKNOWN_STALL first; frames of a C library that is no lock of Python's: DEVICE_WAIT, high."""
    first, final = native(engine()[0], *names)
    assert first.kind is Kind.UNKNOWN_STALL
    assert (final.kind, final.confidence) == (Kind.DEVICE_WAIT, "high")
    assert final.culprit.frame == "run_kernel (model.py:42)"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("0x7f@libc.so.6:0", "PyThread_acquire_lock_timed@libpython3.11.so.1.0:0"), "for a lock"),
        (("futex@nptl/futex-internal.c:9", "0x1@/usr/bin/python3.11:0"), "name no library"),
        (("0x7f@libc.so.6:0", "f@Python/thread_pthread.h:3"), "name no library"),
        ((), "only native frames could tell"),
    ],
)
def test_what_may_be_a_lock_stays_unknown(names: tuple[str, ...], said: str) -> None:
    """A lock, a stripped interpreter or a refused native look (rung PROC, no threads): no name."""
    first, final = native(engine()[0], *names)
    assert (first.kind, final.kind) == (Kind.UNKNOWN_STALL, Kind.UNKNOWN_STALL)
    assert any(said in r for r in final.reasons), final.reasons
    assert final.culprit.frame == "run_kernel (model.py:42)"


def test_the_waiter_is_not_the_culprit() -> None:
    """The finding is about EngineCore's wait; the worker it waits for is accused, and the wait is told."""
    build, _, core, (worker,) = engine()
    worker.stacks = (stack(30, *DEVICE),)
    wait = waiting_core(build, core)
    build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(wait)))
    assert (verdict.kind, verdict.culprit.process) == (Kind.DEVICE_WAIT, "worker:0")
    assert "core:0/main waits for it" in verdict.summary


def test_native_frames_make_a_device_wait_certain() -> None:
    """With native frames that show no Python lock, the device wait is named with high confidence."""
    build, _, _, (worker,) = engine()
    worker.rung = Rung.NATIVE
    worker.stacks = (stack(30, "cudaEventSynchronize@libcuda.so:0", "run_kernel"),)
    lane = build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.confidence) == (Kind.DEVICE_WAIT, "high")
    assert verdict.culprit.frame == "run_kernel (model.py:42)"


@pytest.mark.parametrize(
    ("trap", "said"),
    [
        (("Condition.wait@threading.py:327", "Queue.get@queue.py:171", "take"), "a queue"),
        (("Condition.wait@/usr/lib/python3.12/threading.py:1", "take"), "a threading lock"),
        (("PyThread_acquire_lock_timed@libpython3.11.so:0", "take"), "a lock"),
        (("SSLSocket.read@ssl.py:1", "take"), "a TLS socket"),
        (("_wait@multiprocessing/connection.py:1", "take"), "a multiprocessing connection"),
    ],
)
def test_waiting_by_design_is_not_a_device_wait(trap: tuple[str, ...], said: str) -> None:
    """A lock, queue or socket in a device phase stays UNKNOWN_STALL, and the reason says which."""
    build, _, _, (worker,) = engine()
    worker.stacks = (stack(30, *trap),)
    lane = build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(lane)))
    assert verdict.kind is Kind.UNKNOWN_STALL
    assert any(said in reason for reason in verdict.reasons)
    assert verdict.culprit.frame == "take (model.py:42)"


def test_a_users_own_queue_module_is_no_standard_library() -> None:
    """Only the standard library's queue.py means a wait; `my_engine/queue.py` does not."""
    build, _, _, (worker,) = engine()
    worker.stacks = (stack(30, "Stream.synchronize@my_engine/queue.py:3"),)
    lane = build.lane(worker, "main", "execute_model")
    assert diagnose(build.case(build.late(lane))).kind is Kind.DEVICE_WAIT


def test_a_timed_sleep_is_not_a_device_wait() -> None:
    """time.sleep has no frame of its own; the kernel's wait channel gives it away."""
    build, _, _, (worker,) = engine()
    worker.stacks = (stack(30, "backoff"),)
    worker.threads = {30: ("S", 0.0, "hrtimer_nanosleep")}
    lane = build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(lane)))
    assert verdict.kind is Kind.UNKNOWN_STALL
    assert any("a timed sleep" in reason for reason in verdict.reasons)


def test_scheduling_is_never_a_device_wait() -> None:
    """EngineCore asleep in `schedule` waits for no device: UNKNOWN_STALL."""
    build, _, core, _ = engine()
    core.stacks = (stack(20, "schedule@scheduler.py:5"),)
    lane = build.lane(core, "main", "schedule")
    assert diagnose(build.case(build.late(lane))).kind is Kind.UNKNOWN_STALL


def test_a_uniprocess_core_executing_the_model_can_wait_for_the_device() -> None:
    """Without a worker process the device phase runs on core/main, and counts there."""
    build, _, core, _ = engine()
    core.stacks = (stack(20, *DEVICE),)
    lane = build.lane(core, "main", "execute_model")
    assert diagnose(build.case(build.late(lane))).kind is Kind.DEVICE_WAIT


def test_a_device_queue_over_its_limit_with_an_idle_host_is_a_device_wait() -> None:
    """A channel lane that does not advance while its host thread idles: the device, certainly."""
    build, _, _, (worker,) = engine()
    build.lane(worker, "main", age=60)
    channel = build.lane(worker, "stream/model", "queued", channel=True)
    verdict = diagnose(build.case(build.late(channel)))
    assert (verdict.kind, verdict.confidence) == (Kind.DEVICE_WAIT, "high")
    assert verdict.culprit.lane == "worker:0/stream/model"


def test_a_never_completing_output_event_names_the_copy_lane() -> None:
    """Rule 3: core waits, worker main is idle, the output lane copies: that lane, its poll a device wait."""
    build, _, core, (worker,) = engine()
    build.later = 1
    worker.threads = {33: ("S", 0.0, "hrtimer_nanosleep")}
    worker.stacks = (
        stack(30, "dequeue@vllm/distributed/device_communicators/shm_broadcast.py:961"),
        stack(
            33,
            "wait_event@stallwatch_engine/vllm_plugin/hcu.py:80",
            "get_output@async_utils.py:173",
            name="WorkerAsyncOutputCopy",
        ),
    )
    wait = waiting_core(build, core)
    build.lane(worker, "main", on=CORE, age=61)
    build.lane(worker, "output", "out_copy", tid=33)
    verdict = diagnose(build.case(build.late(wait)))
    assert verdict.kind is Kind.DEVICE_WAIT
    assert verdict.culprit.lane == "worker:0/output"
    assert verdict.culprit.thread == "WorkerAsyncOutputCopy"
    assert verdict.culprit.frame == "get_output (async_utils.py:173)"


def test_a_stuck_output_thread_is_named_when_work_is_pending() -> None:
    """Rule 4: core and workers idle, the core's output lane sends: that lane is accused."""
    build, _api, core, (worker,) = engine()
    core.stacks = (*core.stacks, stack(22, "send_multipart@socket.py:3", "send", name="Thread-2"))
    build.lane(core, "main")
    build.lane(core, "output", "out_send", tid=22)
    build.lane(worker, "main", on=CORE)
    verdict = diagnose(build.case(finding(Rule.NO_PROGRESS, limit_s=120, elapsed_s=121)))
    assert (verdict.kind, verdict.confidence) == (Kind.OUTPUT_BLOCKED, "medium")
    assert verdict.culprit.lane == "core:0/output"
    assert verdict.culprit.thread == "Thread-2"


def test_nothing_stuck_but_work_pending_accuses_nobody() -> None:
    """Rule 6: all lanes idle with work pending: LOST_WAKEUP, never certain, and no culprit."""
    build, _, core, (worker,) = engine()
    build.lanes.clear()
    build.lane(core, "main")
    build.lane(worker, "main")
    verdict = diagnose(build.case(finding(Rule.NO_PROGRESS)))
    assert (verdict.kind, verdict.confidence) == (Kind.LOST_WAKEUP, "medium")
    assert Kind.REMOTE_PEER_WAIT in verdict.kinds
    assert verdict.culprit.address == ""


def test_a_sleeping_gil_owner_is_gil_held_even_in_another_thread() -> None:
    """The owner asleep, every lane silent: GIL_HELD, and the owner's thread and frame are shown."""
    build, _, core, _ = engine()
    core.stacks = (
        stack(20, "schedule@scheduler.py:5"),
        stack(25, "native_sync@ext.py:7", name="helper", gil=True),
    )
    core.threads = {25: ("S", 0.0, "futex_do_wait")}
    lane = build.lane(core, "main", "schedule")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.confidence) == (Kind.GIL_HELD, "high")
    assert verdict.culprit.thread == "helper"
    assert verdict.culprit.frame == "native_sync (ext.py:7)"


def test_gil_held_in_the_core_is_found_before_the_worker_it_waits_for() -> None:
    """A waiter that sits on its own GIL cannot take an answer: it is the culprit, not the idle worker."""
    build, _, core, (worker,) = engine()
    core.stacks = (stack(20, "result@ext.py:1", gil=True),)
    wait = waiting_core(build, core)
    build.lane(worker, "main", on=CORE, age=60)
    verdict = diagnose(build.case(build.late(wait)))
    assert (verdict.kind, verdict.culprit.process) == (Kind.GIL_HELD, "core:0")


def test_a_gil_owner_whose_process_still_beats_is_not_gil_held() -> None:
    """One lane of the process moves, so Python runs there: the owner asleep in one sample was chance."""
    build, _, core, _ = engine()
    core.stacks = (stack(20, "schedule@scheduler.py:5", gil=True),)
    lane = build.lane(core, "main", "schedule")
    build.lane(core, "input", "preprocess", tid=21, age=0.1, moved=True)
    assert diagnose(build.case(build.late(lane))).kind is Kind.UNKNOWN_STALL


def test_a_spinning_core_is_a_runaway() -> None:
    """One core of CPU in one function over two samples: CPU_RUNAWAY, high."""
    build, _, core, _ = engine()
    build.later = 2
    core.state, core.cpu_share = "R", 0.97
    core.stacks = (stack(20, "schedule@scheduler.py:5", active=True, gil=True),)
    lane = build.lane(core, "main", "schedule")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.confidence) == (Kind.CPU_RUNAWAY, "high")
    assert "0.97 of a core" in verdict.summary


@pytest.mark.parametrize(
    ("share", "later", "kind"),
    [
        (0.7, 0, Kind.UNKNOWN_STALL),
        (0.7, 2, Kind.CPU_RUNAWAY),
        (0.85, 0, Kind.CPU_RUNAWAY),
        (0.4, 1, Kind.UNKNOWN_STALL),
        (0.4, 2, Kind.CPU_RUNAWAY),
        (0.1, 2, Kind.UNKNOWN_STALL),
    ],
)
def test_how_much_cpu_makes_a_runaway(share: float, later: int, kind: Kind) -> None:
    """One sample needs 0.8 of a core, more need 0.6; always runnable in three needs 0.2."""
    build, _, core, _ = engine()
    build.later = later
    core.state, core.cpu_share = "R", share
    core.stacks = (stack(20, "schedule@scheduler.py:5", active=True, gil=True),)
    lane = build.lane(core, "main", "schedule")
    assert diagnose(build.case(build.late(lane))).kind is kind


def test_a_regex_in_another_thread_is_a_runaway_of_that_thread() -> None:
    """A loop in C that keeps the GIL and burns a core silences all lanes: its thread is the culprit."""
    build, _, core, _ = engine()
    build.later = 1
    core.cpu_share = 0.0
    core.threads = {25: ("R", 0.98, "")}
    core.stacks = (
        stack(20, "schedule@scheduler.py:5"),
        stack(25, "match@re/__init__.py:166", "parse", name="parser", active=True, gil=True),
    )
    lane = build.lane(core, "main", "schedule")
    verdict = diagnose(build.case(build.late(lane)))
    assert verdict.kind is Kind.CPU_RUNAWAY
    assert verdict.culprit.thread == "parser"


def test_a_driver_that_spins_is_not_called_a_runaway() -> None:
    """A core burnt without the GIL in a device phase may be a spinning device wait: both are left over."""
    build, _, _, (worker,) = engine()
    build.later = 2
    worker.state, worker.cpu_share = "R", 0.99
    worker.stacks = (stack(30, "synchronize@torch/cuda/streams.py:1", active=True, gil=False),)
    lane = build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(lane)))
    assert verdict.kind is Kind.UNKNOWN_STALL
    assert {Kind.CPU_RUNAWAY, Kind.DEVICE_WAIT} <= set(verdict.kinds)


def test_a_stopped_worker_is_found_through_the_cores_wait() -> None:
    """State T without a tracer, seen from EngineCore's finding: PROCESS_STOPPED of the worker."""
    build, _, core, (worker,) = engine()
    worker.state = "T"
    wait = waiting_core(build, core)
    build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(wait)))
    assert (verdict.kind, verdict.confidence) == (Kind.PROCESS_STOPPED, "high")
    assert (verdict.culprit.process, verdict.culprit.phase) == ("worker:0", "execute_model")


def test_a_stopped_gil_owner_is_stopped_not_gil_held() -> None:
    """A SIGSTOPped process owns its GIL for ever; that is a consequence."""
    build, _, core, _ = engine()
    core.state = "T"
    core.stacks = (stack(20, "schedule@scheduler.py:5", gil=True),)
    lane = build.lane(core, "main", "schedule")
    assert diagnose(build.case(build.late(lane))).kind is Kind.PROCESS_STOPPED


def test_a_traced_process_is_not_stopped() -> None:
    """State T under a tracer is a debugger's doing, not a stop signal."""
    build, _, _, (worker,) = engine()
    worker.state, worker.tracer_pid = "T", 99
    lane = build.lane(worker, "main", "execute_model")
    assert diagnose(build.case(build.late(lane))).kind is Kind.UNKNOWN_STALL


def test_the_first_process_that_ended_is_named_not_the_api_that_followed() -> None:
    """A killed worker, then EngineCore, then the API with status 0: the worker, with its last phase."""
    build, api, core, (worker,) = engine()
    waiting_core(build, core, age=1)
    build.lane(worker, "main", "execute_model", age=1)
    gone = build.exit(worker, signal=9)
    build.exit(core, at_s=0.05, status=0)
    build.exit(api, at_s=0.9, status=0)
    subject = Subject(process="api:0", role="api", pid=api.pid, start_ticks=api.ticks)
    verdict = diagnose(build.case(finding(Rule.PROCESS_GONE, subject, elapsed_s=0.1, limit_s=0)))
    assert (verdict.kind, verdict.confidence) == (Kind.CHILD_DIED, "high")
    assert (verdict.culprit.process, verdict.culprit.phase) == ("worker:0", "execute_model")
    assert verdict.culprit.frame == ""
    assert gone.words() in verdict.summary


def test_exits_of_one_look_are_told_apart_by_their_signal() -> None:
    """Seen in one look, in the wrong order: SIGKILL is the cause, exit status 0 the consequence."""
    build, _api, core, (worker,) = engine()
    build.lane(worker, "main", "execute_model")
    build.exit(core, at_s=0.0, status=0)
    build.exit(worker, at_s=0.01, signal=9)
    subject = Subject(process="core:0", role="core", pid=core.pid, start_ticks=core.ticks)
    verdict = diagnose(build.case(finding(Rule.PROCESS_GONE, subject)))
    assert verdict.culprit.process == "worker:0"


def test_a_helper_that_finished_is_no_death() -> None:
    """A compiler child's exit must not turn a device wait into CHILD_DIED."""
    build, _, _, (worker,) = engine()
    helper = build.member(99, "cc", attached=False)
    build.exit(helper, status=0)
    worker.stacks = (stack(30, *DEVICE),)
    lane = build.lane(worker, "main", "execute_model")
    assert diagnose(build.case(build.late(lane))).kind is Kind.DEVICE_WAIT


def test_a_dead_worker_is_found_through_the_wait() -> None:
    """No exit was recorded, yet the process waited for is not among the living: CHILD_DIED, medium."""
    build, _, core, (worker,) = engine()
    wait = waiting_core(build, core)
    build.lane(worker, "main", "execute_model")
    build.dead.add(worker.pid)
    verdict = diagnose(build.case(build.late(wait)))
    assert (verdict.kind, verdict.confidence) == (Kind.CHILD_DIED, "medium")
    assert verdict.culprit.process == "worker:0"


def test_an_orderly_exit_after_a_long_stall_is_not_named_with_high_confidence() -> None:
    """The engine's own timeout may end it: what had been stuck before is in the reasons."""
    build, _api, core, (worker,) = engine()
    worker.stacks = (stack(30, "run_kernel"),)
    build.lane(worker, "main", "execute_model", age=20)
    build.exit(core, status=0)
    subject = Subject(process="core:0", role="core", pid=core.pid, start_ticks=core.ticks)
    verdict = diagnose(build.case(finding(Rule.PROCESS_GONE, subject, elapsed_s=1)))
    assert (verdict.kind, verdict.confidence) == (Kind.CHILD_DIED, "medium")
    assert any("worker:0/main had been in execute_model" in r for r in verdict.reasons)


def test_a_lost_thread_is_found_by_its_rule_and_through_a_wait() -> None:
    """The lane's tid is gone while the process lives: THREAD_DIED, from either finding."""
    for through in (False, True):
        build, _, core, (worker,) = engine()
        worker.gone_tids = frozenset({33})
        lane = build.lane(worker, "output", "out_copy", tid=33)
        wait = build.lane(core, "main", "wait_worker", cls=WAIT, on="worker:0/output")
        judged = build.late(wait) if through else build.late(lane, rule=Rule.THREAD_GONE)
        verdict = diagnose(build.case(judged))
        assert (verdict.kind, verdict.confidence) == (Kind.THREAD_DIED, "high"), through
        assert verdict.culprit.lane == "worker:0/output"
        assert verdict.culprit.thread == "thread 33"


def test_a_thread_that_went_with_its_process_is_a_death_of_the_process() -> None:
    """THREAD_GONE of a process that is no longer among the living: CHILD_DIED."""
    build, _, _, (worker,) = engine()
    lane = build.lane(worker, "output", "out_copy", tid=33)
    build.dead.add(worker.pid)
    verdict = diagnose(build.case(build.late(lane, rule=Rule.THREAD_GONE)))
    assert (verdict.kind, verdict.confidence) == (Kind.CHILD_DIED, "medium")


def test_a_thread_that_a_dying_neighbour_took_along_is_a_death_of_the_neighbour() -> None:
    """THREAD_GONE of core, and at the third look a worker's exit is known: the worker is accused."""
    build, _, core, (worker,) = engine()
    core.gone_tids = frozenset({23})
    lane = build.lane(core, "output", "out_send", tid=23)
    build.lane(worker, "main", "execute_model")
    case = build.case(build.late(lane, rule=Rule.THREAD_GONE))
    ended = build.exit(worker, signal=9)
    case = replace(case, after=replace(case.snapshot, exits=(ended,)))
    verdict = diagnose(case)
    assert (verdict.kind, verdict.culprit.process) == (Kind.CHILD_DIED, "worker:0")
    assert verdict.culprit.phase == "execute_model"


def test_a_load_that_never_returns_is_never_ready_of_the_worker() -> None:
    """Core waits for its workers' start without saying so; the worker's load_model is accused."""
    build, _, core, (worker,) = engine(ready=False)
    worker.stacks = (stack(30, "read_weights"),)
    wait = build.lane(core, "main", "wait_worker_start", cls=START, age=62)
    build.lane(worker, "main", "load_model", cls=START, age=61)
    verdict = diagnose(build.case(build.late(wait)))
    assert verdict.kind is Kind.NEVER_READY
    assert verdict.culprit.lane == "worker:0/main"
    assert verdict.culprit.phase == "load_model"
    assert verdict.culprit.frame == "read_weights (model.py:42)"


@pytest.mark.parametrize(("faults", "slow"), [(5000, True), (3, False)])
def test_a_start_that_waits_for_pages_says_that_storage_is_slow(faults: int, slow: bool) -> None:
    """Major page faults between the looks are waits for storage: they are among the reasons."""
    build, _, _, (worker,) = engine(ready=False)
    lane = build.lane(worker, "main", "load_model", cls=START, age=61)
    case = build.case(build.late(lane))
    late = replace(case.snapshot.processes[30], major_faults=faults)
    after = replace(case.snapshot, processes={**case.snapshot.processes, 30: late})
    verdict = diagnose(replace(case, after=after))
    assert verdict.kind is Kind.NEVER_READY
    assert any("waited for storage 5000 times" in r for r in verdict.reasons) is slow


def test_never_ready_with_nothing_attached_names_the_root_process() -> None:
    """No lane at all: the root process is named and nothing more is claimed."""
    build = Build(ready=False)
    root = build.member(10, "api", attached=False)
    subject = Subject(pid=root.pid, start_ticks=root.ticks)
    verdict = diagnose(build.case(finding(Rule.NEVER_READY, subject)))
    assert verdict.kind is Kind.NEVER_READY
    assert (verdict.culprit.pid, verdict.culprit.lane) == (10, "")


def test_a_start_phase_after_ready_is_not_never_ready() -> None:
    """Reloading weights in a serving engine is a stall of its own, not NEVER_READY."""
    build, _, _, (worker,) = engine()
    lane = build.lane(worker, "main", "reload_weights", cls=START)
    assert diagnose(build.case(build.late(lane))).kind is Kind.UNKNOWN_STALL


def test_an_expired_pause_names_the_owner_of_the_lease() -> None:
    """PAUSED_TOO_LONG says who paused."""
    build, _, core, _ = engine()
    subject = Subject(process="core:0", role="core", pid=core.pid, phase="weight_update")
    case = build.case(finding(Rule.PAUSE_EXPIRED, subject))
    lease = PauseLease("weight_update", "trainer", NOW - 200 * S, NOW - S)
    image = case.snapshot.image
    assert image is not None
    paused = tuple(replace(p, pause=lease) if p.role == "core" else p for p in image.processes)
    image = replace(image, processes=paused)
    verdict = diagnose(replace(case, snapshot=replace(case.snapshot, image=image)))
    assert (verdict.kind, verdict.confidence) == (Kind.PAUSED_TOO_LONG, "high")
    assert "trainer" in verdict.culprit.thread
    assert "trainer" in verdict.summary


def test_a_shutdown_that_hangs_names_what_holds_it() -> None:
    """The finding names only the root's pid; the busy lane in the tree is accused."""
    build, api, _, (worker,) = engine()
    worker.stacks = (stack(30, "destroy_group"),)
    build.lane(worker, "main", "shutdown", cls=LaneClass.STOP)
    subject = Subject(pid=api.pid, start_ticks=api.ticks)
    build.lanes.pop(0)  # the API's loop ended
    verdict = diagnose(build.case(finding(Rule.SHUTDOWN_HANG, subject)))
    assert verdict.kind is Kind.SHUTDOWN_HANG
    assert verdict.culprit.lane == "worker:0/main"


def test_a_blocked_event_loop_is_frontend_blocked_only_if_the_engine_is_fine() -> None:
    """The loop is late and all other lanes idle or move: FRONTEND_BLOCKED; one stuck lane: no."""
    for stuck in (False, True):
        build = Build()
        api = build.member(10, "api", stacks=(stack(10, "handler@app.py:7"),))
        core = build.member(20, "core")
        loop = build.lane(api, "loop", "loop")
        build.lane(core, "main", "schedule" if stuck else "")
        verdict = diagnose(build.case(build.late(loop, limit=30)))
        expected = Kind.UNKNOWN_STALL if stuck else Kind.FRONTEND_BLOCKED
        assert verdict.kind is expected
        assert verdict.culprit.frame == "handler (app.py:7)"


def test_a_regex_on_the_event_loop_is_a_runaway() -> None:
    """A burning front end is CPU_RUNAWAY: the stronger statement."""
    build = Build()
    api = build.member(10, "api", state="R", cpu_share=0.99)
    api.stacks = (
        stack(10, "match@re/__init__.py:166", "tool_parser@p.py:3", active=True, gil=True),
    )
    loop = build.lane(api, "loop", "loop")
    assert diagnose(build.case(build.late(loop))).kind is Kind.CPU_RUNAWAY


def test_a_full_pipe_is_output_blocked() -> None:
    """The kernel says that the thread sleeps in a pipe write: that kind is certain."""
    build, _, core, _ = engine()
    core.stacks = (stack(20, "emit@logging.py:5"),)
    core.threads = {20: ("S", 0.0, "anon_pipe_write")}
    lane = build.lane(core, "main", "schedule")
    assert diagnose(build.case(build.late(lane))).kind is Kind.OUTPUT_BLOCKED


def test_a_declared_circle_is_an_order_cycle() -> None:
    """Two lanes that declared to wait for each other and did not move: ORDER_CYCLE with its edges."""
    build, _, core, (worker,) = engine()
    a = build.lane(core, "main", "send", cls=WAIT, on="worker:0/main")
    build.lane(worker, "main", "send_result", cls=WAIT, on="core:0/main")
    verdict = diagnose(build.case(build.late(a)))
    assert verdict.kind is Kind.ORDER_CYCLE
    assert {(e.waiter, e.target) for e in verdict.edges} >= {
        ("core:0/main", "worker:0/main"),
        ("worker:0/main", "core:0/main"),
    }


def test_an_idle_worker_that_the_core_waits_for_is_no_circle() -> None:
    """The worker idles 'on core' and core waits for it: a lost message or a failed step, not a cycle."""
    build, _, core, (worker,) = engine()
    wait = waiting_core(build, core)
    build.lane(worker, "main", on=CORE, age=60)
    verdict = diagnose(build.case(build.late(wait)))
    assert verdict.kind is Kind.UNKNOWN_STALL
    assert verdict.culprit.lane == "worker:0/main"
    assert Kind.ORDER_CYCLE not in verdict.kinds


# -- two ranks -------------------------------------------------------------------------------------

COLLECTIVE = ("all_reduce@vllm/distributed/parallel_state.py:1", "forward")


def test_the_rank_that_failed_the_step_is_accused_not_the_one_in_the_collective() -> None:
    """TP=2: rank 1 raised and idles, rank 0 waits in the all-reduce: rank 1, whatever the counters say."""
    for work in (9, 10, 11):
        build, _, core, (r0, r1) = engine(ranks=2)
        r0.stacks = (stack(30, *COLLECTIVE),)
        wait = waiting_core(build, core)
        lane = build.lane(r0, "main", "execute_model", work=10)
        build.lane(r1, "main", on=CORE, age=60.9, work=work)
        for judged in (wait, lane):
            verdict = diagnose(build.case(build.late(judged)))
            assert verdict.culprit.process == "worker:1", work
            assert (verdict.kind, verdict.confidence) == (Kind.COLLECTIVE_DIVERGENCE, "medium")


def test_the_log_tells_which_idle_rank_failed() -> None:
    """An ERROR line with the idle rank's pid accuses it even without a stack."""
    build, _, core, (_r0, r1) = engine(ranks=2)
    build.log_tail = (f"(Worker_TP1 pid={r1.pid}) ERROR 11-30 WorkerProc hit an exception.",)
    wait = waiting_core(build, core)
    build.lane(_r0, "main", "execute_model", work=10)
    build.lane(r1, "main", on=CORE, work=11)
    verdict = diagnose(build.case(build.late(wait)))
    assert verdict.culprit.process == "worker:1"
    assert (verdict.kind, verdict.confidence) == (Kind.ERROR_SWALLOWED, "medium")


def test_a_rank_that_finished_its_step_is_not_accused() -> None:
    """Rank 1 is idle with more work done, rank 0 sleeps outside any collective: rank 0."""
    build, _, core, (r0, r1) = engine(ranks=2)
    r0.stacks = (stack(30, *DEVICE),)
    wait = waiting_core(build, core)
    build.lane(r0, "main", "execute_model", work=10)
    build.lane(r1, "main", on=CORE, work=11)
    verdict = diagnose(build.case(build.late(wait)))
    assert (verdict.kind, verdict.culprit.process) == (Kind.DEVICE_WAIT, "worker:0")


def test_the_rank_outside_the_collective_is_accused() -> None:
    """TP=2, both execute: the one that sleeps elsewhere is named, whoever the finding is about."""
    for judged in (0, 1):
        build, _, core, (r0, r1) = engine(ranks=2)
        r0.stacks = (stack(30, *COLLECTIVE),)
        r1.stacks = (stack(40, *DEVICE),)
        waiting_core(build, core)
        lanes = [build.lane(m, "main", "execute_model") for m in (r0, r1)]
        verdict = diagnose(build.case(build.late(lanes[judged])))
        assert (verdict.kind, verdict.culprit.process) == (Kind.DEVICE_WAIT, "worker:1")


def test_all_ranks_in_one_collective_name_no_kind() -> None:
    """A device wait and diverged collectives look the same from here: two kinds, no name."""
    build, _, core, ranks = engine(ranks=2)
    wait = waiting_core(build, core)
    for member in ranks:
        member.stacks = (stack(member.pid, *COLLECTIVE),)
        build.lane(member, "main", "execute_model")
    verdict = diagnose(build.case(build.late(wait)))
    assert verdict.kind is Kind.UNKNOWN_STALL
    assert Kind.COLLECTIVE_DIVERGENCE in verdict.kinds


def test_the_lowest_step_of_four_ranks_is_accused() -> None:
    """Three ranks at step 11, one at 10: that one."""
    build, _, core, ranks = engine(ranks=4)
    wait = waiting_core(build, core)
    for member in ranks:
        build.lane(member, "main", "execute_model", work=10 if member.rank == 2 else 11)
    verdict = diagnose(build.case(build.late(wait)))
    assert verdict.culprit.process == "worker:2"


def test_a_stopped_rank_is_found_from_the_other_ranks_finding() -> None:
    """Rank 0 waits in the collective for rank 1, which is in state T: PROCESS_STOPPED of rank 1."""
    build, _, _, (r0, r1) = engine(ranks=2)
    r0.stacks = (stack(30, *COLLECTIVE),)
    r1.state = "T"
    lane = build.lane(r0, "main", "execute_model")
    build.lane(r1, "main", "execute_model")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.culprit.process) == (Kind.PROCESS_STOPPED, "worker:1")


# -- the final word --------------------------------------------------------------------------------


def _verdict(kind: Kind, lane: str = "worker:0/main", confidence: str = "medium") -> Verdict:
    build, _, _, (worker,) = engine()
    worker.stacks = (stack(30, "run_kernel"),)
    base = diagnose(build.case(build.late(build.lane(worker, "main", "execute_model"))))
    return replace(
        base,
        kind=kind,
        kinds=(kind,),
        confidence=confidence,
        culprit=replace(base.culprit, lane=lane),
    )


def test_unknown_may_be_refined() -> None:
    """The later look knows more: its kind stands."""
    first, second = _verdict(Kind.UNKNOWN_STALL), _verdict(Kind.CPU_RUNAWAY, confidence="high")
    assert refine(first, second) == second


def test_a_given_name_is_never_contradicted() -> None:
    """The clients were told DEVICE_WAIT; a later GIL_HELD lowers the confidence and is written down."""
    first, second = _verdict(Kind.DEVICE_WAIT), _verdict(Kind.GIL_HELD, confidence="high")
    final = refine(first, second)
    assert (final.kind, final.confidence) == (Kind.DEVICE_WAIT, "low")
    assert Kind.GIL_HELD in final.kinds
    assert any("GIL_HELD" in r for r in final.reasons)


def test_a_later_blank_takes_nothing_away() -> None:
    """No later stacks: the first name stays as it was."""
    first, second = _verdict(Kind.DEVICE_WAIT), _verdict(Kind.UNKNOWN_STALL)
    second = replace(second, reasons=("there is no stack",))
    assert refine(first, second).confidence == first.confidence


def test_an_accused_process_is_not_exchanged() -> None:
    """UNKNOWN_STALL in worker:0 does not become DEVICE_WAIT in worker:1."""
    first = _verdict(Kind.UNKNOWN_STALL)
    final = refine(first, _verdict(Kind.DEVICE_WAIT, lane="worker:1/main"))
    assert final.kind is Kind.UNKNOWN_STALL
    assert final.culprit.lane == "worker:0/main"


def test_more_samples_refine_a_suspected_runaway() -> None:
    """0.7 of a core in one sample is unknown; two more samples in the same function name it."""
    build, _, core, _ = engine()
    core.state, core.cpu_share = "R", 0.7
    core.stacks = (stack(20, "schedule@scheduler.py:5", active=True, gil=True),)
    judged = build.late(build.lane(core, "main", "schedule"))
    first = diagnose(build.case(judged))
    build.later = 2
    final = refine(first, diagnose(build.case(judged)))
    assert (first.kind, final.kind) == (Kind.UNKNOWN_STALL, Kind.CPU_RUNAWAY)


def test_a_users_vocabulary_extends_the_tables() -> None:
    """A phase of a user's own engine becomes a device phase by data alone."""
    build = Build()
    member = build.member(50, "vocoder", stacks=(stack(50, *DEVICE),))
    lane = build.lane(member, "main", "code2wav")
    case = build.case(build.late(lane))
    assert diagnose(case).kind is Kind.UNKNOWN_STALL
    words = DEFAULT.extended(device_phases={"code2wav"})
    assert diagnose(case, words).kind is Kind.DEVICE_WAIT
    with pytest.raises(TypeError, match="no table"):
        DEFAULT.extended(phases={"x"})


def test_how_long_it_was_stopped_comes_from_the_judges_memory() -> None:
    """The board's looks are 30 s apart or none; the memory of state T decides the confidence."""
    build, _, _, (worker,) = engine()
    worker.state = "T"
    lane = build.lane(worker, "main", "execute_model")
    case = build.case(build.late(lane))
    fresh = Recall(stopped_since_ns={worker.pid: NOW - S // 10})
    verdict = diagnose(replace(case, snapshot=replace(case.snapshot, recall=fresh)))
    assert (verdict.kind, verdict.confidence) == (Kind.PROCESS_STOPPED, "medium")


def test_frames_helper_reads_places() -> None:
    """The builder's shorthand means what the tests above think."""
    assert str(frames("f@a/b.py:3")[0]) == "f (a/b.py:3)"


def test_a_thread_that_uses_cpu_does_not_wait_for_a_device() -> None:
    """Asleep at the looks but 0.3 of a core between them: it polls something, UNKNOWN_STALL."""
    build, _, _, (worker,) = engine()
    worker.stacks = (stack(30, "poll_queue"),)
    worker.cpu_share = 0.3
    lane = build.lane(worker, "main", "execute_model")
    assert diagnose(build.case(build.late(lane))).kind is Kind.UNKNOWN_STALL


@pytest.mark.parametrize("work", [9, 10])
def test_without_stacks_the_counters_accuse_the_idle_rank(work: int) -> None:
    """No stack, no log: an idle rank with no more work done than the one that executes is accused."""
    build, _, core, (r0, r1) = engine(ranks=2)
    wait = waiting_core(build, core)
    build.lane(r0, "main", "execute_model", work=10)
    build.lane(r1, "main", on=CORE, work=work)
    assert diagnose(build.case(build.late(wait))).culprit.process == "worker:1"


def test_the_only_rank_in_another_phase_is_accused() -> None:
    """Three ranks sample, one still executes: that one, though its counter is the same."""
    build, _, core, ranks = engine(ranks=4)
    wait = waiting_core(build, core)
    for member in ranks:
        phase = "execute_model" if member.rank == 3 else "sample_tokens"
        build.lane(member, "main", phase, age=61 if member.rank != 3 else 60)
    assert diagnose(build.case(build.late(wait))).culprit.process == "worker:3"


def test_our_own_wrapper_does_not_hide_a_library_wait() -> None:
    """The plugin wraps Queue.get: its frame in between changes nothing."""
    build, _, _, (worker,) = engine()
    worker.stacks = (
        stack(
            30,
            "Condition.wait@threading.py:327",
            "marked@stallwatch_engine/vllm_plugin/vllm_map.py:1",
            "Queue.get@queue.py:171",
            "take",
        ),
    )
    lane = build.lane(worker, "main", "execute_model")
    verdict = diagnose(build.case(build.late(lane)))
    assert any("a queue" in r for r in verdict.reasons)
    assert verdict.culprit.frame == "take (model.py:42)"


def test_a_process_without_lanes_is_named_once() -> None:
    """A root that never attached: its pid and name once, and what is true of it."""
    build = Build(ready=False)
    root = build.member(13362, "python", attached=False)
    subject = Subject(pid=root.pid, start_ticks=root.ticks)
    judged = replace(finding(Rule.NEVER_READY, subject, elapsed_s=6.1, limit_s=6), key="x:silence")
    summary = diagnose(build.case(judged)).summary
    assert summary == (
        "pid 13362 (python) is not attached to the board; "
        "nothing of the start has moved for 6.1 s (limit 6 s); no process has attached."
    )


def test_the_total_limit_of_a_start_claims_no_silence() -> None:
    """Lanes move, the whole start took too long: who has not called ready(), and that it moves."""
    build = Build(ready=False)
    build.member(20, "core", ready=True)
    worker = build.member(30, "worker", ready=False)
    lane = build.lane(worker, "main", "load_weights", cls=START, age=1, moved=True)
    judged = replace(
        build.late(lane, rule=Rule.NEVER_READY, limit=600), key="never-ready:total",
        elapsed_ns=601 * S,
    )  # fmt: skip
    verdict = diagnose(build.case(judged))
    assert verdict.kind is Kind.NEVER_READY
    assert verdict.summary == (
        "worker:0 (pid 30) has been in load_weights on lane main for 1.0 s, and it moves; "
        "the whole start has taken 601.0 s (limit 600 s); worker:0 has not called ready()."
    )
    assert "nothing" not in KINDS[Kind.NEVER_READY].meaning


def test_an_expired_pause_is_told_apart_from_its_lanes() -> None:
    """The lease's name is no phase of a lane: the pause, by how much it is over, and the lanes."""
    build, _, core, _ = engine()
    build.lane(core, "m", "execute_model", age=2)
    subject = Subject("core:0", "core", 0, core.pid, core.ticks, phase="gc")
    case = build.case(finding(Rule.PAUSE_EXPIRED, subject, elapsed_s=7.5, limit_s=5))
    image = case.snapshot.image
    assert image is not None
    lease = PauseLease("gc", "me", NOW - 7 * S, NOW - 2 * S)
    paused = tuple(replace(p, pause=lease) if p.role == "core" else p for p in image.processes)
    case = replace(case, snapshot=replace(case.snapshot, image=replace(image, processes=paused)))
    verdict = diagnose(case)
    assert verdict.summary == (
        "the pause gc of owner me has outlived its lease by 2.5 s; "
        "lanes of core:0 (pid 20): m in execute_model for 2.0 s."
    )
    assert (verdict.culprit.phase, verdict.culprit.address) == ("", "core:0")


def test_a_stopped_process_says_how_long_it_was_stopped() -> None:
    """The rule's limit of half a second is no limit of the phase: only the time stopped is told."""
    build, _, _, (worker,) = engine()
    worker.state = "T"
    build.lane(worker, "main", "execute_model")
    subject = Subject("worker:0", "worker", 0, worker.pid, worker.ticks)
    judged = finding(Rule.PROCESS_STOPPED, subject, elapsed_s=0.7, limit_s=0.5)
    summary = diagnose(build.case(judged)).summary
    said = "worker:0 (pid 30) is stopped (state T) for 0.7 s while in execute_model"
    assert summary.startswith(said)
    assert "limit" not in summary


def test_pending_work_that_does_not_finish_is_not_the_age_of_a_lane() -> None:
    """NO_PROGRESS names a lane with that lane's own age, and its own limit beside it."""
    build, _, core, (worker,) = engine()
    build.lane(core, "main", "send_result", age=40)
    build.lane(worker, "main", on=CORE)
    judged = finding(Rule.NO_PROGRESS, elapsed_s=121, limit_s=120)
    summary = diagnose(build.case(judged)).summary
    assert "in send_result on lane main for 40.0 s" in summary
    assert "no pending work was finished for 121.0 s (limit 120 s)" in summary


def test_one_thing_is_told_in_the_singular() -> None:
    """'1 other process', never '1 other process(es)'."""
    build, api, core, (worker,) = engine()
    build.exit(core, at_s=0.0, signal=9)
    build.exit(api, at_s=0.5, status=0)
    subject = Subject("core:0", "core", 0, core.pid, core.ticks)
    reasons = diagnose(build.case(finding(Rule.PROCESS_GONE, subject, limit_s=0))).reasons
    assert any("; 1 other process ended with or after it" in r for r in reasons), reasons
    build.exit(worker, at_s=0.6, status=0)
    reasons = diagnose(build.case(finding(Rule.PROCESS_GONE, subject, limit_s=0))).reasons
    assert any("; 2 other processes ended" in r for r in reasons), reasons
