"""The report: stable keys, bounded, redacted; its text says first what a person needs first."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.board.image import BoardImage, LaneClass, LaneImage, PhaseFrame, ProcessImage
from stallwatch.diagnosis.kinds import KINDS, Kind
from stallwatch.diagnosis.verdict import Case, Culprit, Edge, Verdict
from stallwatch.evidence import report, text
from stallwatch.evidence.model import Frame, ProcessEvidence, Rung, Target, ThreadStack
from stallwatch.evidence.redact import Redactor
from stallwatch.evidence.report import Context, artefacts, build_report, live
from stallwatch.heartbeat.failure import Failure
from stallwatch.lifecycle.states import State
from stallwatch.watch.finding import Finding, Level, Rule, Subject
from stallwatch.watch.snapshot import EngineFacts, Exit, ProcFacts, Snapshot

S = 1_000_000_000
ID = "st-20261130T031502Z-9f2c41aa"
KEYS = [
    "schema",
    "id",
    "engine",
    "incarnation",
    "kind",
    "kinds",
    "confidence",
    "summary",
    "culprit",
    "elapsed_s",
    "limit_s",
    "action",
    "detected_at",
    "rung",
    "processes",
    "stacks",
    "stack_tree",
    "wait_graph",
    "host",
    "gpu",
    "logs",
    "requests",
    "timeline",
]
CULPRIT = Culprit(
    "worker:0", "worker", 0, 100, "worker:0/model", "execute_model", "MainThread", "hold (m.py:9)"
)
FAILURE = Failure(
    ID, "chat", 2, "GIL_HELD", "worker:0/model", "execute_model", 31.0, 30.0, "restart"
)
VERDICT = Verdict(
    Kind.GIL_HELD,
    CULPRIT,
    "high",
    "worker:0 sits in hold with the GIL.",
    (Kind.GIL_HELD, Kind.DEVICE_WAIT),
    ("the owner of the GIL sleeps",),
    (Edge("core:0/busy", "worker:0/model", "step_result"),),
)


def lane(rank: int, note: str = "") -> LaneImage:
    stack = (
        PhaseFrame("step", LaneClass.WORK, 2 * S, 2 * S, 0),
        PhaseFrame("execute_model", LaneClass.WORK, 3 * S, 9 * S, 30 * S),
    )
    args = (rank, 100 + rank, 100 + rank, 1, "worker", rank, "model", False, stack, 7, 5)
    return LaneImage(*args, "", (("step", 4),), note)


def case(count: int = 2, *, rung: Rung = Rung.PYSPY, note: str = "", log: tuple = ()) -> Case:
    targets = [Target(100 + r, 1, "worker", r) for r in range(count)]
    frames = (Frame("hold", "m.py", 9), Frame("step", "m.py", 5))
    stacks = {
        t.pid: ProcessEvidence(
            t,
            rung,
            (ThreadStack(t.pid, "MainThread", frames, owns_gil=t.rank == 0),),
            {"state": "S", "wchan": "hrtimer_nanosleep"},
            problems=() if rung is Rung.PYSPY else ("py-spy was refused",),
        )
        for t in targets
    }
    image = BoardImage(
        2,
        40 * S,
        tuple(ProcessImage(i, t.pid, 1, "worker", i, True, 3, 0) for i, t in enumerate(targets)),
        tuple(lane(t.rank, note) for t in targets),
    )
    facts = {t.pid: ProcFacts(t.pid, 1, 1, "python", "S", 1, 0, 1, 1) for t in targets}
    dead = Exit(999, 1, 1, False, signal=9, comm="core", oom_killed=True)
    snap = Snapshot(40 * S, EngineFacts("chat", 2, State.SUSPECT), image, facts, (dead,))
    subject = Subject("worker:0", "worker", 0, 100, 1, 100, "worker:0/model", "execute_model")
    finding = Finding(
        Rule.PHASE_OVER_LIMIT, Level.OVER, subject, 9 * S, 31 * S, 30 * S, "k", (), ("PSI full",)
    )
    return Case(finding, (finding,), snap, snap, stacks, log_tail=log)


def full(**over) -> dict:
    context = Context(
        1_800_000_000.25,
        ("vllm", "serve", "--api-key", "s3cretvalue"),
        requests=("cmpl-1", "cmpl-2"),
        timeline=((0.0, "confirmed"), (0.21, "first stacks")),
        **over,
    )
    return build_report(FAILURE, VERDICT, case(note="HF_TOKEN=s3cretvalue"), context)


def test_the_keys_are_exactly_the_contract():
    """Keys and their order are those of the design, and the culprit's too."""
    found = full()
    assert list(found) == KEYS
    assert list(found["culprit"]) == [
        "process",
        "role",
        "rank",
        "pid",
        "lane",
        "phase",
        "thread",
        "frame",
    ]
    assert json.loads(json.dumps(found)) == found


def test_what_every_process_did_is_there():
    """Each process with its lanes, ages and limits; a dead one with its end in words."""
    rows = {row["address"]: row for row in full()["processes"]}
    (found,) = rows["worker:0"]["lanes"]
    assert (found["phase"], found["class"], found["age_s"], found["limit_s"]) == (
        "execute_model",
        "work",
        31.0,
        30.0,
    )
    assert (found["beats"], found["work"], found["details"]) == (7, 5, {"step": 4})
    assert found["outer"][0]["phase"] == "step"
    assert rows["pid:999"]["exit"] == "signal 9 (out of memory)"
    assert rows["worker:1"]["rung"] == "py-spy"


def test_secrets_and_request_ids_are_out():
    """Command, lane text and requests carry no secret and no id in clear."""
    raw = json.dumps(full())
    assert "s3cretvalue" not in raw
    assert "cmpl-" not in raw
    assert full()["requests"]["in_flight"] == 2


def test_the_rung_is_the_culprits_or_the_worst():
    """With a culprit its own best rung; without one the worst of all, never a flattering one."""
    mixed = case()
    low = dataclasses.replace(mixed.stacks[101], rung=Rung.PROC)
    mixed = dataclasses.replace(mixed, stacks={100: mixed.stacks[100], 101: low})
    assert build_report(FAILURE, VERDICT, mixed, Context(0.0))["rung"] == "py-spy"
    nobody = dataclasses.replace(VERDICT, culprit=Culprit())
    assert build_report(FAILURE, nobody, mixed, Context(0.0))["rung"] == "proc"


def test_a_dead_culprit_keeps_its_name():
    """A process that died and left the board is named by the finding that speaks of it."""
    base = case()
    subject = Subject("core:0", "core", 0, 999, 1)
    finding = dataclasses.replace(base.finding, subject=subject, rule=Rule.PROCESS_GONE)
    found = build_report(FAILURE, VERDICT, dataclasses.replace(base, finding=finding), Context(0.0))
    assert "core:0" in {row["address"] for row in found["processes"]}


def test_later_samples_are_numbered():
    """Sample 0 is the first look; further ones follow in order, and the tree stays the first."""
    base = case()
    later = dataclasses.replace(base, later=({100: base.stacks[100]},))
    found = build_report(FAILURE, VERDICT, later, Context(0.0))
    assert [(s["pid"], s["sample"]) for s in found["stacks"]] == [(100, 0), (101, 0), (100, 1)]


@pytest.mark.slow
def test_a_huge_engine_gives_a_bounded_report():
    """200 processes with long texts, logs and timelines stay under 2 MB, and build quickly."""
    big = case(200, note="x" * 10_000, log=tuple("y" * 1000 for _ in range(500)))
    context = Context(
        0.0,
        ("a" * 1000,) * 1000,
        requests=tuple(map(str, range(10_000))),
        timeline=tuple((float(i), "z" * 900) for i in range(1000)),
        gpu={"devices": [{"x": "y" * 999}] * 1000},
    )
    assert len(json.dumps(build_report(FAILURE, VERDICT, big, context))) < 2_000_000


def test_artefacts_hold_the_rest():
    """Every thread and the whole log tail go to files, redacted like the report."""
    files = artefacts(case(100, log=("HF_TOKEN=s3cretvalue",) * 500))
    assert len(json.loads(files["stacks.json"])) == 100
    assert files["log.txt"].count(b"\n") == 499
    assert b"s3cretvalue" not in files["log.txt"]


def test_the_text_begins_with_the_sentence_and_ends_with_what_is_not_known():
    """Sentence, kind, culprit, processes, waits, stacks, deeds, advice, gaps: in that order."""
    lines = list(text.render(full()))
    assert lines[0] == VERDICT.summary
    order = [
        "kind      GIL_HELD",
        "culprit   worker:0/model (pid 100)",
        "What every process was doing",
        "Who waits for whom",
        "Stacks, merged",
        "What was done",
        "What to do next",
        "What is not known",
    ]
    at = [next(i for i, line in enumerate(lines) if line.startswith(o)) for o in order]
    assert at == sorted(at)
    whole = "\n".join(lines)
    assert KINDS[Kind.GIL_HELD].advice in whole
    assert "could also be DEVICE_WAIT" in whole
    assert "core:0/busy -> worker:0/model  (step_result)" in whole
    assert "the GIL is held by MainThread (tid 100) in hold (m.py:9)" in whole


def test_the_culprits_stack_comes_first_and_idle_ones_last():
    """Among the merged stacks the culprit's frame leads and waiting helpers trail."""
    base = case()
    idle = ThreadStack(5, "h", (Frame("Condition.wait", "threading.py", 1),))
    other = ThreadStack(6, "o", (Frame("aaa", "x.py", 1),))
    stacks = {
        100: dataclasses.replace(base.stacks[100], threads=(idle, other, *base.stacks[100].threads))
    }
    found = build_report(FAILURE, VERDICT, dataclasses.replace(base, stacks=stacks), Context(0.0))
    lines = "\n".join(text.render(found)).partition("Stacks, merged")[2]
    assert (
        lines.index("hold (m.py:9)") < lines.index("aaa (x.py:1)") < lines.index("Condition.wait")
    )


def test_what_is_not_known_is_said():
    """An unknown kind, culprit and a degraded rung are all named as gaps."""
    verdict = Verdict(Kind.UNKNOWN_STALL, Culprit(), "low", "It does not move.")
    found = build_report(FAILURE, verdict, case(rung=Rung.PROC), Context(0.0))
    gaps = "\n".join(text.render(found)).partition("What is not known")[2]
    assert "The kind" in gaps
    assert "The culprit." in gaps
    assert "worker:0: py-spy was refused" in gaps


@pytest.mark.parametrize("action", ["observe", "alert", "fail", "restart", "other", None])
def test_every_action_has_words(action):
    """The text says what was done for every action, known or not."""
    lines = "\n".join(text.render({**full(), "action": action}))
    assert lines.partition("What was done")[2].strip()


def test_no_escape_reaches_the_terminal():
    """Escapes in a lane's text, a frame's name or a log line never come out of the text."""
    base = case(note="\x1b[2J\x07\u202e", log=("\x1b]0;pwn\x07",))
    evil = ThreadStack(1, "\x1b[1m", (Frame("\x1b[31mf", "\r\n.py", 1),))
    stacks = {100: dataclasses.replace(base.stacks[100], threads=(evil,), problems=("\x9b2J",))}
    found = build_report(FAILURE, VERDICT, dataclasses.replace(base, stacks=stacks), Context(0.0))
    for line in (*text.render(found), *text.render_live(live(stacks))):
        assert line == "" or line.isprintable()


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=12) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None)  # a loaded machine is no failure
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8))
def test_a_damaged_report_still_renders(found):
    """Whatever the values of a report that was read back, its text comes without an exception."""
    assert all(line == "" or line.isprintable() for line in text.render(found))


def test_bounded_values_are_json():
    """Anything nested becomes plain JSON of bounded depth and width."""
    deep: list = []
    for _ in range(50):
        deep = [deep]
    out = report.bounded(
        {"a": deep, "b": object(), 3: range(2), "c": [1] * 1000, "n": float("nan")}
    )
    json.dumps(out, allow_nan=False)
    assert len(json.dumps(out)) < 2000
    assert len(out["c"]) == 256


def strange(secret: str) -> Case:
    """A case in which an engine wrote the secret wherever it may write."""
    base = case(
        note=f"note {secret}", log=(f"line {secret}", "-----BEGIN PRIVATE KEY-----", "QUJD" * 16)
    )
    frames = (Frame(f"f_{secret}", f"/x/{secret}.py", 9),)
    threads = (ThreadStack(100, f"t-{secret}", frames),)
    stacks = {
        pid: dataclasses.replace(e, threads=threads, facts={secret: secret}, problems=(secret,))
        for pid, e in base.stacks.items()
    }
    image = base.snapshot.image
    assert image is not None
    lanes = tuple(
        dataclasses.replace(
            one,
            wait_on=secret,
            details=((secret, 1),),
            stack=tuple(dataclasses.replace(f, name=f"p {secret}") for f in one.stack),
        )
        for one in image.lanes
    )
    facts = {
        pid: dataclasses.replace(one, comm=secret) for pid, one in base.snapshot.processes.items()
    }
    snapshot = dataclasses.replace(
        base.snapshot, image=dataclasses.replace(image, lanes=lanes), processes=facts
    )
    return dataclasses.replace(base, snapshot=snapshot, stacks=stacks, later=(stacks,))


def test_a_known_secret_is_nowhere_in_what_is_kept():
    """Threads, files, phases, details, facts, logs, steps: a value that was given as a secret."""
    secret, redactor = "plainwords", Redactor(["plainwords"])
    found = strange(secret)
    verdict = dataclasses.replace(
        VERDICT,
        summary=secret,
        reasons=(secret,),
        culprit=Culprit(*[secret] * 3, 100, *[secret] * 4),
    )
    context = Context(0.0, ["x", secret], timeline=[(0.0, secret)], redactor=redactor)
    context = dataclasses.replace(context, gpu={secret: [secret]}, host={secret: secret})
    kept = build_report(FAILURE, verdict, found, context)
    assert list(kept) == KEYS
    assert secret not in json.dumps(kept)
    assert secret not in json.dumps(live(found.stacks, redactor))
    for content in artefacts(found, redactor).values():
        assert secret.encode() not in content
        assert b"QUJDQUJD" not in content


def test_a_named_secret_is_nowhere_in_what_is_kept():
    """The same places, for a secret that only its name gives away, coloured or not."""
    for name in ("api_key=", "api_\x1b[1mkey\x1b[0m="):
        found = strange(f"{name}s3cretvalue")
        assert "s3cretvalue" not in json.dumps(build_report(FAILURE, VERDICT, found, Context(0.0)))
        assert "s3cretvalue" not in json.dumps(live(found.stacks))
        assert not any(b"s3cretvalue" in content for content in artefacts(found).values())
