"""The text of a report says what its timeline, exits and stacks say, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stallwatch.diagnosis.classify import diagnose
from stallwatch.diagnosis.kinds import Kind
from stallwatch.evidence import text
from stallwatch.evidence.deeds import FURTHER, gateway_words
from stallwatch.evidence.logtail import collapse
from stallwatch.evidence.model import Frame, ProcessEvidence, Rung, Target, ThreadStack
from stallwatch.evidence.report import Context, build_report
from stallwatch.heartbeat.failure import Failure
from stallwatch.testing.cases import Build, finding, stack
from stallwatch.watch.finding import Rule, Subject

ID = "st-20261130T031502Z-9f2c41aa"
CONFIRMED = "confirmed: phase-over-limit, two looks agree"


def report(case: Any = None, *, action: str = "restart", **over: Any) -> dict[str, Any]:
    """The report of a worker asleep, or of the given case, as the daemon keeps it."""
    if case is None:
        build = Build()
        worker = build.member(30, "worker", stacks=(stack(30, "run_kernel"),))
        lane = build.lane(worker, "main", "execute_model")
        case = build.case(build.late(lane))
    verdict = diagnose(case)
    f = case.finding
    failure = Failure(
        ID, "chat", 1, verdict.kind, verdict.culprit.address, "", f.elapsed_ns / 1e9,
        f.limit_ns / 1e9, action,
    )  # fmt: skip
    return build_report(failure, verdict, case, Context(0.0)) | over


def told(*texts: str, action: str = "restart", **over: Any) -> str:
    """'What was done' of a report with this timeline."""
    steps = [{"at_s": 0.1 * i, "text": t} for i, t in enumerate((CONFIRMED, *texts))]
    whole = "\n".join(text.render(report(action=action, timeline=steps, **over)))
    return whole.partition("What was done")[2].partition("What to do next")[0]


def dead(**how: Any) -> Any:
    build = Build()
    build.member(20, "core")
    worker = build.member(30, "worker")
    build.lane(worker, "main", "execute_model")
    build.exit(worker, **how)
    subject = Subject("worker:0", "worker", 0, worker.pid, worker.ticks)
    return build.case(finding(Rule.PROCESS_GONE, subject, elapsed_s=0, limit_s=0))


def test_nobody_waited_and_nobody_was_killed():
    """No client waited, no process was left: no word of failed clients or an ended engine."""
    found = told(
        "declared, action: restart", f"{FURTHER}: 0 of every process", "no client was waiting",
        "tree gone: 0 processes killed in 0.01 s",
    )  # fmt: skip
    assert "No client was waiting." in found
    assert "No process was left to kill." in found
    assert "were failed" not in found
    assert "ended and is started" not in found
    assert "being collected" not in found


def test_clients_that_were_answered_and_processes_that_were_killed():
    """Both are told with what the timeline counted, and a restart only as what follows."""
    found = told(
        "declared, action: restart", f"{FURTHER}: 3 of every process",
        "every waiting client answered 0.31 s after confirmation",
        "tree gone: 3 processes killed in 0.12 s",
    )  # fmt: skip
    assert "Every waiting client was answered with the failure." in found
    assert "3 processes were killed." in found
    assert "Its action is a restart within the budget" in found


def test_clients_of_a_gateway_are_told_beside_the_engines_own():
    """Nobody waited in the engine, or nobody was left in it: the gateway answered all the same."""
    ends = f"{FURTHER}: 0 of every process", gateway_words(4, 3)
    for own in ("no client was waiting", "the front end is gone: the connections were closed"):
        found = told("declared, action: restart", own, *ends)
        assert "The gateway answered 3 requests with the failure." in found
        assert "No client was waiting." not in found
        assert "Nobody was left" not in found
    found = told("declared, action: restart", ends[0], gateway_words(1, 0))
    assert "The gateway held 1 request: this report does not know" in found
    assert "not recorded" not in found.partition("The end of its processes")[0]
    found = told("some clients could not be answered by the engine; the kill closes them", *ends)
    assert "Not every waiting client could be answered by the engine." in found
    assert "The gateway answered 3 requests with the failure." in found


def test_an_unfinished_report_says_so():
    """Kept right after the declaration: evidence is being collected, nothing is claimed done."""
    found = told("declared, action: restart")
    assert "The rest of the evidence is being collected" in found
    assert "The end of its processes is not recorded." in found
    assert "Whether clients were answered is not recorded." in found


def test_a_stop_that_was_asked_for_promises_no_restart():
    """A shutdown that hangs ends in a kill and no restart, whatever the kind's action is."""
    found = told("tree gone: grace over: 1 processes killed in 0.1 s", kind="SHUTDOWN_HANG")
    assert "A stop had been asked for" in found
    assert "Its action is a restart" not in found
    assert "1 process was killed." in found
    assert "1 process killed in" in found


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("tree gone: the whole tree ended", "Its processes are gone: the whole tree ended."),
        ("survived SIGKILL: pid 3 (x) in state D", "A process survived SIGKILL"),
    ],
)
def test_the_end_of_the_tree_is_told_as_it_was(last: str, said: str):
    """A tree that ended by itself was not killed; one that survived is not gone."""
    found = told("declared, action: restart", last)
    assert said in found
    assert ("Its action is a restart" in found) is last.startswith("tree gone")


def test_an_observed_engine_that_moves_again():
    """observe: nothing was done, and it moved again."""
    found = told(
        "declared, action: observe",
        f"{FURTHER}: 2 of every process",
        "it moves again",
        action="observe",
    )
    assert "Nothing was done about it" in found
    assert "It moved again by itself." in found


@pytest.mark.parametrize(
    ("how", "said", "unsaid"),
    [
        ({"status": 3}, "The log tail says why; status 3.", "ignal 9"),
        ({"signal": 9}, "Signal 9: out of memory, or an operator.", "status"),
        ({"signal": 7}, "Signal 7: shared memory", "operator"),
        ({}, "How it ended is not known", "ignal"),
    ],
)
def test_a_death_is_advised_by_how_it_ended(how: dict[str, int], said: str, unsaid: str):
    """Signals are explained only when one ended the process; a status sends to the log."""
    whole = "\n".join(text.render(report(dead(**how))))
    advice = whole.partition("What to do next")[2].partition("What is not known")[0]
    assert said in advice
    assert unsaid not in advice


def test_a_death_has_no_silence_and_no_frame():
    """CHILD_DIED: no '0.0 s, limit 0.0 s', no frame among what is not known, lanes in the past."""
    lines = list(text.render(report(dead(signal=9))))
    assert not any(line.startswith("silence") for line in lines)
    assert not any("frame in which" in line for line in lines)
    assert any("last: worker:0/main" in line for line in lines)


def test_the_time_says_what_it_measured():
    """Half a second is the limit of a stopped process, not of its phase."""
    build = Build()
    worker = build.member(30, "worker", state="T")
    build.lane(worker, "main", "execute_model")
    subject = Subject("worker:0", "worker", 0, worker.pid, worker.ticks)
    case = build.case(finding(Rule.PROCESS_STOPPED, subject, elapsed_s=0.7, limit_s=0.5))
    lines = list(text.render(report(case)))
    assert "stopped   0.7 s, told after 0.5 s" in lines
    assert any("Find who sent SIGSTOP: a debugger" in line for line in lines)
    assert "silence   61.0 s, limit 60.0 s" in list(text.render(report()))


@pytest.mark.parametrize(("stacks", "unknown"), [([{"pid": 30, "threads": [{}]}], 0), ([], 1)])
def test_a_stopped_process_with_a_stack_lacks_no_frame(stacks, unknown):
    """The frame of a whole process is unknown only without any stack of it."""
    culprit = {"process": "worker:0", "pid": 30, "lane": "", "frame": ""}
    lines = text.render(report(kind="PROCESS_STOPPED", culprit=culprit, stacks=stacks))
    assert sum("frame in which" in line for line in lines) == unknown


def test_advice_about_devices_needs_more_than_low_confidence():
    """DEVICE_WAIT with low confidence, and UNKNOWN_STALL, send to the culprit's stack first."""
    said = f"Read the culprit's stack first; `stallwatch dump {ID}` bundles it."
    for over in ({"kind": "DEVICE_WAIT", "confidence": "low"}, {"kind": "UNKNOWN_STALL"}):
        whole = "\n".join(text.render(report(**over)))
        assert said in whole
        assert "suspect the device" not in whole
    sure = "\n".join(text.render(report(kind="DEVICE_WAIT", confidence="medium")))
    assert "suspect the device" in sure


def test_an_unattached_process_has_its_pid_once():
    """'pid 30 (worker)', never 'pid:30 (pid 30)'."""
    culprit = {"process": "pid:30", "pid": 30, "lane": ""}
    lines = list(text.render(report(culprit=culprit)))
    assert "culprit   pid 30 (worker)" in lines


NATIVE = (
    Frame("0x7f01", "/lib/libc.so.6", 0),
    Frame("0x7f02", "/lib/libc.so.6", 0),
    Frame("hipStreamSynchronize", "/opt/libamdhip64.so", 0),
    Frame("run_kernel", "model.py", 42),
    Frame("call", "/x/stallwatch_engine/phasemap.py", 3),
    Frame("forward", "model.py", 50),
    Frame("0x5501", "/lib/libc.so.6", 0),
)


def merged(case: Any) -> list[str]:
    lines = list(text.render(report(case)))
    begin = lines.index("Stacks, merged") + 1
    return lines[begin : lines.index("", begin)]


def native_case(extra: int = 0) -> Any:
    build = Build()
    core = build.member(20, "core", stacks=(stack(20, "step@core.py:9"),))
    worker = build.member(30, "worker", stacks=(stack(30, "run_kernel", "forward"),))
    others = tuple(stack(100 + n, f"f{n}", "g", "h", name=f"t{n}") for n in range(extra))
    core.stacks = (*core.stacks, *others)
    lane = build.lane(worker, "main", "execute_model")
    case = build.case(build.late(lane))
    threads = (ThreadStack(30, "MainThread", NATIVE, False, False),)
    look = ProcessEvidence(Target(30, worker.ticks, "worker", 0), Rung.NATIVE, threads)
    refused = dataclasses.replace(look, rung=Rung.PROC, threads=())
    return dataclasses.replace(case, later=({30: look}, {30: refused}))


def test_native_frames_are_shown_and_our_own_are_not():
    """The rung is py-spy-native: the C frames are there; wrappers and thread starts are not."""
    case = native_case()
    assert report(case)["rung"] == "py-spy-native"
    assert merged(case)[:5] == [
        "  [worker:0] 1 thread",
        "      ?? (/lib/libc.so.6)",
        "      hipStreamSynchronize (/opt/libamdhip64.so:0)",
        "      run_kernel (model.py:42)",
        "      forward (model.py:42)".replace("42", "50"),
    ]
    assert not any("stallwatch_engine" in line for line in merged(case))


def test_long_stacks_end_and_say_so():
    """Forty lines at most, the culprit's process first, and how much was left out."""
    lines = merged(native_case(extra=30))
    assert len(lines) <= 41
    assert lines[0] == "  [worker:0] 1 thread"
    assert lines[-1].startswith("  ... 2")
    assert lines[-1].endswith("places where threads stand were left out: `-o json` has all")


def test_a_culprit_in_a_range_of_ranks_comes_first():
    """Without a frame the culprit's process is found in 'worker:0-3,5', and leads."""
    build = Build()
    for n in range(3):
        build.member(20 + n, "core", n, stacks=(stack(20 + n, "a"),))
    worker = build.member(31, "worker", 1, stacks=(stack(31, "z"),))
    lane = build.lane(worker, "main", "execute_model")
    culprit = {"process": "worker:1", "role": "worker", "rank": 1, "pid": 31, "frame": ""}
    lines = list(text.render(report(build.case(build.late(lane)), culprit=culprit)))
    assert lines[lines.index("Stacks, merged") + 1] == "  [worker:1] 1 thread"


def test_equal_access_log_lines_are_one_line_and_a_count():
    """Runs of one request's line fold; other lines only when they are exactly equal."""
    hit = 'INFO: 10.0.0.1:{} - "GET /health?x={} HTTP/1.1" 200 OK'
    lines = ["a 1", "a 2", *(hit.format(4000 + n, n) for n in range(13)), "b", "b", "c"]
    assert list(collapse(lines)) == [
        "a 1", "a 2", hit.format(4000, 0), "... 12 similar lines", "b", "... 1 similar line", "c",
    ]  # fmt: skip


def test_an_expired_pause_names_a_lease_and_no_phase():
    """PAUSED_TOO_LONG: 'lease', not 'thread'; no phase, no missing frame."""
    culprit = {"process": "worker:0", "pid": 30, "thread": "lease gc of me"}
    lines = list(text.render(report(kind=str(Kind.PAUSED_TOO_LONG), culprit=culprit)))
    assert "lease     lease gc of me" in lines
    assert not any("frame in which" in line for line in lines)
