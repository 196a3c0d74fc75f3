"""Kinds that several lanes, processes or files tell together, and the traps beside each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis.ask import question
from stallwatch.diagnosis.classify import diagnose
from stallwatch.diagnosis.kinds import KINDS, Action, Kind, Remedy
from stallwatch.diagnosis.verdict import Case, Verdict
from stallwatch.testing.cases import Build, Member, finding, stack
from stallwatch.watch.finding import Rule, Subject
from stallwatch.watch.objects import LockFile, Objects

WAIT, IDLE = LaneClass.WAIT, LaneClass.IDLE
QUEUE = ("get@queue.py:171", "take")


def idle_pair(*, sent: int | None = None, seen: int | None = None) -> tuple[Build, Member, Member]:
    """A core and a worker that both rest in their idle place, with their counters if any."""
    build = Build()
    core = build.member(20, "core", pending=3, stacks=(stack(20, *QUEUE),))
    worker = build.member(30, "worker", stacks=(stack(30, *QUEUE),))
    ends = ((core, "api:0/loop", "sent", sent), (worker, "core:0/main", "seen", seen))
    for member, on, name, count in ends:
        build.lane(member, "main", on=on)
        if count is not None:
            build.lanes[-1] = replace(build.lanes[-1], details=((name, count),))
    return build, core, worker


def stuck(build: Build) -> Verdict:
    return diagnose(build.case(finding(Rule.NO_PROGRESS)))


def test_counters_that_differ_accuse_the_channel() -> None:
    """Seven sent, six seen, both idle: LOST_WAKEUP of the channel with high confidence."""
    build, _, _ = idle_pair(sent=7, seen=6)
    verdict = stuck(build)
    assert (verdict.kind, verdict.confidence) == (Kind.LOST_WAKEUP, "high")
    assert verdict.culprit.address == "core:0/main -> worker:0/main"
    assert "7 were sent and 6 seen" in verdict.summary


def test_a_channel_is_told_by_its_two_ends() -> None:
    """Who got nothing from whom, and for how long: a channel is no lane that 'has been in idle'."""
    build, _, _ = idle_pair(sent=7, seen=6)
    summary = stuck(build).summary
    assert "worker:0/main (pid 30) has got nothing from core:0/main for 61.0 s; " in summary
    assert "in idle" not in summary
    build.moved.add("worker:0/main")  # it polls: its age is that of the poll
    summary = stuck(build).summary
    assert "worker:0/main (pid 30) has got nothing from core:0/main; " in summary


def test_a_channel_whose_answer_was_lost_names_its_waiter_once() -> None:
    """The waiter is an end of the channel: 'waits for it' would say it again."""
    build = Build()
    core = build.member(20, "core", stacks=(stack(20, *QUEUE),))
    worker = build.member(30, "worker", stacks=(stack(30, *QUEUE),))
    wait = build.lane(core, "main", "ask", cls=WAIT, on="worker:0/main")
    build.lane(worker, "main", age=60)
    verdict = diagnose(build.case(build.late(wait)))
    assert verdict.culprit.address == "core:0/main -> worker:0/main"
    assert "worker:0/main (pid 30) has got nothing from core:0/main for 60.0 s; " in verdict.summary
    assert "waits for it" not in verdict.summary


def test_counters_that_agree_make_nothing_certain() -> None:
    """Seven sent and seven seen: still nobody works, but no counter says where it was lost."""
    build, _, _ = idle_pair(sent=7, seen=7)
    assert stuck(build).confidence != "high"


def test_a_scheduler_that_turns_is_no_lost_message() -> None:
    """The same two, and a scheduler that is seen at work and moves: it is what turns for nothing."""
    build, core, _ = idle_pair()
    build.lane(core, "scheduler", "schedule", moved=True, tid=21)
    verdict = stuck(build)
    assert (verdict.kind, verdict.confidence) == (Kind.NO_FORWARD_PROGRESS, "high")
    assert verdict.culprit.lane == "core:0/scheduler"


def test_a_poll_is_no_scheduler() -> None:
    """A helper that only polls moves too, and explains nothing."""
    build, _, worker = idle_pair()
    worker.stacks = (*worker.stacks, stack(31, "sleep@time.py:1", "poll", name="aux"))
    worker.threads = {31: ("S", 0.0, "hrtimer_nanosleep")}
    build.lane(worker, "aux", moved=True, tid=31)
    assert stuck(build).kind is Kind.LOST_WAKEUP


def test_a_wait_that_leaves_the_engine_accuses_the_peer() -> None:
    """The worker waits for tcp://...: REMOTE_PEER_WAIT of that address, and no restart."""
    build = Build()
    worker = build.member(30, "worker", stacks=(stack(30, "recv@socket.py:1", "load"),))
    lane = build.lane(worker, "kv", "kv_load", cls=WAIT, on="tcp://10.0.0.7:5600")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.confidence) == (Kind.REMOTE_PEER_WAIT, "high")
    assert verdict.culprit.process == "tcp://10.0.0.7:5600"
    assert KINDS[verdict.kind].by_kind is Action.FAIL


def test_a_circle_with_a_running_thread_is_not_certain() -> None:
    """One of the waiters runs: it may come out of its wait by itself."""
    for state, confidence in (("S", "high"), ("R", "medium")):
        build = Build()
        a = build.member(20, "core", stacks=(stack(20, *QUEUE),))
        b = build.member(30, "worker", state=state)
        b.stacks = (stack(30, *QUEUE, active=state == "R"),)
        late = build.lane(a, "main", "ask", cls=WAIT, on="worker:0/main")
        build.lane(b, "main", "tell", cls=WAIT, on="core:0/main")
        verdict = diagnose(build.case(build.late(late)))
        assert (verdict.kind, verdict.confidence) == (Kind.ORDER_CYCLE, confidence)


@pytest.mark.parametrize(
    ("names", "wchan", "confidence"),
    [
        (("fill_table", "load"), "futex_do_wait", "medium"),
        (("sem_timedwait@libc.so.6:0", "_block@chaos.py:1"), "futex_do_wait", "medium"),
        (("fill_table",), "hrtimer_nanosleep", "medium"),
        (("take_both",), "anon_pipe_read", "high"),
        (("PyThread_acquire_lock_timed@libpython3.11.so:0", "take_both"), "futex_do_wait", "high"),
        (("wait_reply", "tell"), "futex_do_wait", "high"),
        (("Event.synchronize@torch/cuda/streams.py:224",), "futex_do_wait", "high"),
        ((), "futex_do_wait", "high"),
    ],
)
def test_a_circle_of_which_one_lane_shows_no_wait_is_not_certain(
    names: tuple[str, ...], wchan: str, confidence: str
) -> None:
    """A lane declared that it waits, and its frames show other work: medium, and the frame is told."""
    build = Build()
    a = build.member(20, "core", stacks=(stack(20, *QUEUE),))
    b = build.member(30, "worker", stacks=(stack(30, *names),) if names else ())
    b.threads = {30: ("S", 0.0, wchan)}
    late = build.lane(a, "main", "ask", cls=WAIT, on="worker:0/main")
    build.lane(b, "main", "tell", cls=WAIT, on="core:0/main")
    verdict = diagnose(build.case(build.late(late)))
    assert (verdict.kind, verdict.confidence) == (Kind.ORDER_CYCLE, confidence)
    if confidence == "medium":
        assert any("the frames of worker:0/main show no wait" in r for r in verdict.reasons)


def test_a_circle_that_an_idle_lane_closes_is_none() -> None:
    """A idles for want of B, and B waits for A: nobody sent A its work, and no circle is told."""
    build = Build()
    core, a, b = build.member(10, "core"), build.member(20, "offload"), build.member(30, "worker")
    late = build.lane(core, "main", "ask", cls=WAIT, on="offload:0/serve")
    build.lane(a, "serve", cls=IDLE, on="worker:0/main")
    build.lane(b, "main", "wait_rows", cls=WAIT, on="offload:0/serve")
    verdict = diagnose(build.case(build.late(late)))
    assert Kind.ORDER_CYCLE not in verdict.kinds
    assert verdict.culprit.lane == "offload:0/serve"
    assert not any("wait for each other" in r for r in verdict.reasons)
    assert any("worker:0/main waits for it, and it is idle" in r for r in verdict.reasons)


def test_a_circle_that_a_full_pipe_contradicts_is_no_circle() -> None:
    """One lane declared a wait and sleeps in a write meanwhile: the pipe is to blame, not the order."""
    build = Build()
    a = build.member(20, "core", stacks=(stack(20, *QUEUE),))
    b = build.member(30, "worker", stacks=(stack(30, "emit@logging.py:5"),))
    b.threads = {30: ("S", 0.0, "anon_pipe_write")}
    late = build.lane(a, "main", "ask", cls=WAIT, on="worker:0/main")
    build.lane(b, "main", "tell", cls=WAIT, on="core:0/main")
    verdict = diagnose(build.case(build.late(late)))
    assert (verdict.kind, verdict.culprit.lane) == (Kind.OUTPUT_BLOCKED, "worker:0/main")


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 3, 7])
def test_the_one_of_eight_in_another_collective_is_certain(odd: int) -> None:
    """Seven reduce, one gathers, a step behind: COLLECTIVE_DIVERGENCE of that one, high."""
    build = Build()
    lanes = []
    for rank in range(8):
        name = "all_gather" if rank == odd else "all_reduce"
        member = build.member(30 + rank, "worker", rank, stacks=(stack(30 + rank, name),))
        lanes.append(build.lane(member, "main", name, work=9 if rank == odd else 10))
    verdict = diagnose(build.case(build.late(lanes[(odd + 1) % 8])))
    assert (verdict.kind, verdict.confidence) == (Kind.COLLECTIVE_DIVERGENCE, "high")
    assert verdict.culprit.rank == odd
    waits = {(e.waiter, e.target, e.why) for e in verdict.edges}
    others = set(range(8)) - {odd}
    assert waits == {(f"worker:{n}/main", f"worker:{odd}/main", "collective") for n in others}


def test_an_odd_rank_asleep_elsewhere_keeps_both_kinds() -> None:
    """It may have trouble of its own or have skipped a collective: named, not certain, both told."""
    build = Build()
    lanes = []
    for rank in range(4):
        frames = ("run_kernel",) if rank == 2 else ("all_reduce",)
        member = build.member(30 + rank, "worker", rank, stacks=(stack(30 + rank, *frames),))
        lanes.append(build.lane(member, "main", "execute_model", work=9 if rank == 2 else 10))
    verdict = diagnose(build.case(build.late(lanes[0])))
    assert verdict.culprit.rank == 2
    assert verdict.confidence == "medium"
    assert {Kind.COLLECTIVE_DIVERGENCE, Kind.DEVICE_WAIT} <= set(verdict.kinds)


@pytest.mark.parametrize(("peers", "confidence"), [("all_reduce", "high"), ("", "medium")])
def test_a_first_load_is_certain_only_beside_a_collective(peers: str, confidence: str) -> None:
    """load_binary alone may be a slow disk; with all peers in the collective it is LAZY_LOAD_LOCK."""
    build = Build()
    first = build.member(30, "worker", 0, stacks=(stack(30, "load_binary", "forward"),))
    lane = build.lane(first, "main", "forward")
    for rank in (1, 2) if peers else ():
        member = build.member(30 + rank, "worker", rank, stacks=(stack(30 + rank, peers),))
        build.lane(member, "main", "forward")
    verdict = diagnose(build.case(build.late(lane)))
    assert (verdict.kind, verdict.confidence) == (Kind.LAZY_LOAD_LOCK, confidence)
    assert verdict.culprit.rank == 0


# -- files and forks -------------------------------------------------------------------------------


def polling(*locks: LockFile) -> Verdict:
    """A worker that polls in wait_for_lock, and the lock files that were found."""
    build = Build()
    worker = build.member(30, "worker", stacks=(stack(30, "wait_for_lock", "build"),))
    worker.threads = {30: ("S", 0.0, "hrtimer_nanosleep")}
    lane = build.lane(worker, "main", "build")
    case = build.case(build.late(lane))
    assert question(case).polling
    return diagnose(replace(case, objects=Objects(locks=locks)))


@pytest.mark.parametrize(
    ("locks", "kind"),
    [
        ((LockFile("/c/build.lock", 900.0, named=True),), Kind.STALE_LOCK_FILE),
        ((LockFile("/c/build.lock", 900.0, holder=77, named=True),), Kind.UNKNOWN_STALL),
        ((), Kind.UNKNOWN_STALL),
    ],
)
def test_only_a_lock_file_that_nobody_holds_is_stale(
    locks: tuple[LockFile, ...], kind: Kind
) -> None:
    """The function's name is no proof: the file must be there, and its holder must not."""
    verdict = polling(*locks)
    assert verdict.kind is kind
    assert ("/c/build.lock" in verdict.summary) is (kind is Kind.STALE_LOCK_FILE)


def fork_case(*, twin: bool, attached: bool = False) -> Case:
    """A worker waits for a child whose stack begins as its own does and ends in a lock."""
    build = Build()
    outer = ("save@app.py:5", "main@app.py:9", "<module>@app.py:12")
    worker = build.member(30, "worker", stacks=(stack(30, *outer),))
    child = build.member(31, "worker", 1, attached=attached)
    child.stacks = (stack(31, "write@app.py:2", *outer),)
    lane = build.lane(worker, "main", "save_checkpoint")
    case = build.case(build.late(lane))
    facts = replace(case.snapshot.processes[31], ppid=30, threads=1)
    snapshot = replace(case.snapshot, processes={**case.snapshot.processes, 31: facts})
    twins = frozenset({31}) if twin else frozenset()
    return replace(case, snapshot=snapshot, objects=Objects(twins=twins))


def test_a_forked_child_in_a_lock_is_accused_instead_of_its_parent() -> None:
    """The parent waits for it: FORK_OR_FD_INHERITANCE of the child, by its pid."""
    verdict = diagnose(fork_case(twin=True))
    assert (verdict.kind, verdict.culprit.pid) == (Kind.FORK_OR_FD_INHERITANCE, 31)
    assert "worker:0" in verdict.summary


@pytest.mark.parametrize(("twin", "attached"), [(False, False), (True, True)])
def test_the_same_program_started_anew_is_no_fork(twin: bool, attached: bool) -> None:
    """Another command line, or a process with lanes of its own: its stack alone proves nothing."""
    case = fork_case(twin=twin, attached=attached)
    assert diagnose(case).kind is not Kind.FORK_OR_FD_INHERITANCE


# -- logs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "RuntimeError: CUDA error"])
def test_a_log_is_a_hint_and_never_certain(line: str) -> None:
    """An error in the log of an idle engine: ERROR_SWALLOWED, medium; who wrote it is not known."""
    build, _, _ = idle_pair()
    build.log_tail = ("step 7 done", line)
    verdict = stuck(build)
    assert (verdict.kind, verdict.confidence) == (Kind.ERROR_SWALLOWED, "medium")
    assert Kind.LOST_WAKEUP in verdict.kinds


def test_an_old_error_does_not_explain_a_device_wait() -> None:
    """A worker asleep in a driver's call is that, whatever the log holds."""
    build = Build()
    build.log_tail = ("ValueError: a bad request",)
    frames = ("synchronize@torch/cuda/streams.py:224",)
    worker = build.member(30, "worker", stacks=(stack(30, *frames),))
    lane = build.lane(worker, "main", "execute_model")
    assert diagnose(build.case(build.late(lane))).kind is Kind.DEVICE_WAIT


# -- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "watts", "words"),
    [
        ("96", "15", "96 % busy at 15 of 300 W: a kernel spins"),
        ("96", "280", "96 % busy at 280 W"),
        ("0", "14", "idle: the event that is waited for is missing"),
        ("[N/A]", "14", ""),
        ("nan", "14", ""),
    ],
)
def test_a_device_wait_tells_what_the_device_did(busy: str, watts: str, words: str) -> None:
    """Utilisation and power together: full use at little power is a spinning kernel, not work."""
    build = Build()
    worker = build.member(30, "worker")
    worker.stacks = (stack(30, "synchronize@torch/cuda/streams.py:224"),)
    lane = build.lane(worker, "main", "execute_model")
    other = {"index": "0", "uuid": "b", "utilization.gpu": "50"}
    mine = {"index": "1", "uuid": "a", "utilization.gpu": busy, "power.draw": watts,
            "power.limit": "300"}  # fmt: skip
    gpu = {"devices": [other, mine], "holders": [{"pid": "30", "uuid": "a"}]}
    verdict = diagnose(replace(build.case(build.late(lane)), gpu=gpu))
    assert verdict.kind is Kind.DEVICE_WAIT
    said = [r for r in verdict.reasons if r.startswith("device ")]
    assert said == ([f"device 1 is {words}"] if words else [])


def test_a_reader_that_caught_up_lost_nothing() -> None:
    """At the last look it has seen the seventh message: no counter accuses the channel any more."""
    build, _, _ = idle_pair(sent=7, seen=6)
    case = build.case(finding(Rule.NO_PROGRESS))
    lanes = tuple(
        replace(x, details=(("seen", 7),)) if x.role == "worker" else x
        for x in case.snapshot.image.lanes
    )
    after = replace(case.snapshot, image=replace(case.snapshot.image, lanes=lanes))
    assert diagnose(replace(case, after=after)).confidence != "high"


# -- the table -------------------------------------------------------------------------------------


def test_every_kind_has_a_page() -> None:
    """K01 to K23 once each, all words given; what a restart does not cure, or what was to end, is not."""
    codes = sorted(info.code for info in KINDS.values() if info.code)
    assert codes == [f"K{n:02}" for n in range(1, 24)]
    for kind, info in KINDS.items():
        assert all((info.meaning, info.culprit, info.advice)), kind
    kept = {k for k, info in KINDS.items() if info.by_kind is Action.FAIL}
    assert kept == {
        Kind.REMOTE_PEER_WAIT, Kind.STALE_LOCK_FILE, Kind.UNKILLABLE, Kind.LEFTOVER_RESOURCE,
        Kind.SHUTDOWN_HANG,
    }  # fmt: skip
    told = {k for k, info in KINDS.items() if info.by_kind is Action.ALERT}
    assert told == {Kind.PAUSED_TOO_LONG, Kind.DEGRADED}
    assert {info.remedy for info in KINDS.values()} == set(Remedy)


def test_a_verdict_says_which_rule_decided() -> None:
    """The last reason names the rule, so that a table of verdicts can be explained."""
    build, _, _ = idle_pair(sent=2, seen=1)
    assert stuck(build).reasons[-1] == "decided by the rule lost_wakeup"


# -- the front end ---------------------------------------------------------------------------------


def front(age: float = 61) -> tuple[Build, Member]:
    """An api whose loop sleeps in a C call."""
    build = Build()
    api = build.member(10, "api", pending=2, stacks=(stack(10, "block@chaos.py:9", "beat"),))
    build.lane(api, "loop", "loop", age=age)
    return build, api


def of_loop(build: Build) -> Verdict:
    return diagnose(build.case(build.late(build.lanes[0], limit=30)))


@pytest.mark.parametrize("on", ["api:0/loop", "api:0", "core:0/main"])
def test_who_waits_for_a_blocked_loop_is_its_victim(on: str) -> None:
    """A wait for the front end, direct or through another lane, speaks for FRONTEND_BLOCKED."""
    build, _ = front()
    core = build.member(20, "core", stacks=(stack(20, *QUEUE),))
    worker = build.member(30, "worker", stacks=(stack(30, *QUEUE),))
    build.lane(core, "main", "inbox", cls=WAIT, on="api:0/loop")
    build.lane(worker, "main", "answer", cls=WAIT, on=on)
    verdict = of_loop(build)
    assert (verdict.kind, verdict.culprit.lane) == (Kind.FRONTEND_BLOCKED, "api:0/loop")


@pytest.mark.parametrize(("moved", "kind"), [(False, Kind.FRONTEND_BLOCKED), (True, None)])
def test_a_wait_that_is_over_before_the_loops_own_limit_leads_to_it(
    moved: bool, kind: Kind | None
) -> None:
    """The worker's wait for the api is late first: a loop that stands is named, one that turns is not."""
    build, _ = front(age=0.05 if moved else 46)
    if moved:
        build.moved.add("api:0/loop")
    worker = build.member(30, "worker", stacks=(stack(30, *QUEUE),))
    wait = build.lane(worker, "scheduler", "api_read", cls=WAIT, on="api:0/loop", age=45.5)
    verdict = diagnose(build.case(build.late(wait, limit=45)))
    assert verdict.culprit.lane == "api:0/loop"
    if kind is None:
        assert verdict.kind is not Kind.FRONTEND_BLOCKED
    else:
        assert (verdict.kind, verdict.confidence) == (kind, "medium")
        assert "worker:0/scheduler waits for it" in verdict.summary


def test_a_step_that_began_after_the_loop_had_stopped_does_not_explain_it() -> None:
    """The engine worked on: a long step of it, within its limit, is no cause of what came before."""
    for age, expected in ((40, Kind.FRONTEND_BLOCKED), (90, Kind.UNKNOWN_STALL)):
        build, _ = front()
        worker = build.member(30, "worker", stacks=(stack(30, "forward"),))
        build.lane(worker, "main", "prefill", age=age)
        assert of_loop(build).kind is expected


def test_a_front_end_alone_is_named_without_certainty() -> None:
    """No other process has a lane: the loop is blocked all the same; medium, and it says why."""
    build, _ = front()
    verdict = of_loop(build)
    assert (verdict.kind, verdict.confidence) == (Kind.FRONTEND_BLOCKED, "medium")
    assert any("cannot be seen" in reason for reason in verdict.reasons)


# -- two processes of one name ---------------------------------------------------------------------


@pytest.mark.parametrize("accused", [30, 31])
def test_the_pid_tells_two_processes_of_one_name_apart(accused: int) -> None:
    """Two workers attached as rank 0: the report is about the one that is late, lanes and stack too."""
    build = Build()
    late = {}
    for pid in (30, 31):
        name = "stuck" if pid == accused else "healthy"
        member = build.member(pid, "worker", stacks=(stack(pid, "all_reduce", name),))
        own = "model" if pid == accused else "aux"
        late[pid] = build.lane(member, "main", "execute_model", age=61 if pid == accused else 0.1)
        build.lane(member, own, "turn", age=0.1, tid=pid + 500)
    verdict = diagnose(build.case(build.late(late[accused])))
    assert verdict.culprit.pid == accused
    assert f"(pid {accused})" in verdict.summary
    assert "2 processes attached as worker:0: pids 30, 31" in verdict.reasons


def test_a_stopped_process_is_not_shown_in_its_namesakes_phase() -> None:
    """A rule that names only the pid: the phase is of that pid's lane, not of the other's."""
    build = Build()
    for pid, phase in ((30, "decode"), (31, "prefill")):
        member = build.member(pid, "worker", state="T" if pid == 30 else "S")
        build.lane(member, "main", phase, age=5 if pid == 30 else 50)
    subject = Subject(process="worker:0", role="worker", pid=30, start_ticks=300)
    verdict = diagnose(build.case(finding(Rule.PROCESS_STOPPED, subject)))
    assert (verdict.culprit.pid, verdict.culprit.phase) == (30, "decode")
