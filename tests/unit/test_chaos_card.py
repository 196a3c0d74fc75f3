"""Report cards, targets, wishes and scenario headers: the pure parts of chaos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.chaos import card, desk, scenario
from stallwatch.chaos.faults import FAULTS, expected
from stallwatch.chaos.target import choose
from stallwatch.cli import chaos as command
from stallwatch.diagnosis.kinds import Kind
from stallwatch.errors import StallwatchError, UnknownEngine
from stallwatch.heartbeat import chaos as hook
from stallwatch.testing.service import stall_report
from stallwatch.testing.snapshots import facts, frame, lane, process, snapshot
from stallwatch.watch.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
SAID = {
    "process": "worker:0", "role": "worker", "lane": "model", "pid": 4243, "seed": 7,
    "began_at": "2026-11-30T03:14:02Z", "fault": "gil",
}  # fmt: skip


def report(kind: str = "GIL_HELD", **culprit: Any) -> dict[str, Any]:
    found = stall_report("st-20261130T031502Z-9f2c41aa", kind=kind)
    found["culprit"] |= culprit
    return found


def test_command_hook_and_data_name_the_same_faults():
    """What can be typed is what the data holds; what happens inside is what the hook can do."""
    assert list(FAULTS) == list(command.FAULTS)
    inside = {name for name, fault in FAULTS.items() if fault.inside}
    assert inside == {*hook._FAULTS, "slow", "leak-fd"}


def test_the_right_kind_and_culprit_are_right():
    """Kind as expected, the process that was hit: right, with the latency from the injection."""
    found = card.grade(card.fault_done(SAID), report())
    assert (found.grade, found.wrong) == ("right", [])
    assert found.latency_s == 60.0
    assert found.over_limit_s == 0.1


def test_no_name_is_not_a_wrong_name():
    """UNKNOWN_STALL with the right culprit is unsure: nobody is misled, but nothing is named."""
    assert card.grade(card.fault_done(SAID), report("UNKNOWN_STALL")).grade == "unsure"


@pytest.mark.parametrize(
    ("kind", "culprit", "says"),
    [
        ("DEVICE_WAIT", {}, "the kind is DEVICE_WAIT with high confidence"),
        (
            "GIL_HELD",
            {"process": "api:0", "lane": "api:0/loop", "pid": 1},
            "the culprit is api:0/loop",
        ),
        ("UNKNOWN_STALL", {"process": "", "lane": "", "pid": 0}, "the culprit is nobody"),
    ],
)
def test_a_wrong_kind_or_culprit_is_wrong(kind, culprit, says):
    """Either of them alone is enough, and the card says which."""
    found = card.grade(card.fault_done(SAID), report(kind, **culprit))
    assert (found.grade, found.wrong) == ("wrong", [says])


def test_nothing_found_is_wrong_unless_nothing_was_to_be_found():
    """A fault that must stall something needs a verdict; leaked files and false alarms do not."""
    assert card.grade(card.fault_done(SAID), None).wrong == ["nothing was found"]
    assert card.grade(card.fault_done({**SAID, "fault": "leak-fd"}), None).grade == "right"
    quiet = card.Done("f02_idle", (), "", quiet=True)
    assert card.grade(quiet, None).grade == "right"
    assert card.grade(quiet, report()).wrong == ["there was nothing to find"]


def test_worker_1_is_not_worker_10():
    """The culprit pattern ends where the process's name ends."""
    done = card.fault_done({**SAID, "process": "worker:1"})
    wrong = report(process="worker:10", lane="worker:10/model")
    assert card.grade(done, wrong).grade == "wrong"
    assert card.grade(done, report(process="worker:1", lane="worker:1/model")).grade == "right"


def test_a_front_end_that_stands_may_be_told_as_that():
    """A spin on the loop of the api is FRONTEND_BLOCKED as well; in a worker it is not."""
    assert Kind.FRONTEND_BLOCKED in expected("spin", "api")
    assert Kind.FRONTEND_BLOCKED not in expected("spin", "worker")


def test_no_escape_reaches_the_operator_through_a_card():
    """A culprit's name and a summary from a hostile engine come out as plain lines of 80 columns."""
    bad = report(lane="worker:0/\x1b[2J\u202e\n", process="worker:0")
    lines = list(card.lines([card.grade(card.fault_done(SAID), bad)]))
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) <= 80


@given(
    st.fixed_dictionaries(
        {},
        optional={
            key: st.none() | st.text() | st.integers() | st.dictionaries(st.text(), st.text())
            for key in ("kind", "culprit", "detected_at", "limit_s", "elapsed_s", "summary")
        },
    )
)
def test_a_damaged_report_gives_a_card(found):
    """Whatever was read back, there is a card and it is not right by accident."""
    graded = card.grade(card.fault_done(SAID), found)
    assert graded.grade != "right"
    assert all(line.isprintable() for line in card.lines([graded]))


def two_workers() -> Any:
    lanes = [
        lane("loop", frame("loop"), role="api", pid=1, work=9),
        lane("model", frame("execute_model"), pid=2, work=9),
        lane("model", frame("execute_model"), pid=3, rank=1, work=9),
        lane("aux", frame("poll"), pid=3, rank=1),
        lane("stream", frame("kernel"), pid=3, rank=1, work=9, channel=True),
    ]
    return snapshot(
        1000.0,
        lanes,
        processes=[
            process("api", 0, pid=1),
            process("worker", 0, pid=2),
            process("worker", 1, pid=3),
        ],
        procs=[facts(pid) for pid in (1, 2, 3, 9)],
    )


MEMBERS = {1: 1, 2: 1, 3: 1, 9: 1}


def test_a_seed_picks_the_same_target_every_time():
    """One seed, one target; over many seeds every worker is hit, and never the front end."""
    look = two_workers()
    for fault in ("gil", "stop"):
        hit = [choose(fault, "", s, snapshot=look, members=MEMBERS).address for s in range(40)]
        again = [choose(fault, "", s, snapshot=look, members=MEMBERS).address for s in range(40)]
        assert hit == again
        assert {address.partition("/")[0] for address in hit} == {"worker:0", "worker:1"}


def test_a_channel_or_a_lane_without_work_is_not_picked():
    """A channel has no thread to hold; a lane that never worked may never take the order."""
    look = two_workers()
    hit = {choose("gil", "worker:1", s, snapshot=look, members=MEMBERS).lane for s in range(20)}
    assert hit == {"model"}
    assert choose("gil", "worker:1/aux", 0, snapshot=look, members=MEMBERS).lane == "aux"


def test_only_members_are_hit():
    """A pid of the board that is no member (any more) is nobody's target."""
    look = two_workers()
    left = {1: 1, 2: 1, 3: 2}
    hit = {choose("kill", "", s, snapshot=look, members=left).pid for s in range(20)}
    assert hit == {2}
    with pytest.raises(UnknownEngine, match="no lane 'worker:1'"):
        choose("gil", "worker:1", 0, snapshot=look, members=left)
    with pytest.raises(UnknownEngine, match="no process 'worker:9'"):
        choose("kill", "worker:9", 0, snapshot=look, members=left)


def test_a_member_without_a_name_is_hit_by_its_pid():
    """`--on pid:9`: a process that never attached can be stopped and killed."""
    aim = choose("stop", "pid:9", 0, snapshot=two_workers(), members=MEMBERS)
    assert (aim.pid, aim.process, aim.lane) == (9, "pid:9", "")


def engine(**fields: Any) -> Any:
    values = {
        "number": 1,
        "chaos_folder": None,
        "latest": two_workers,
        "members": lambda: MEMBERS,
        "policy": lambda: Policy(default_ns=int(4e9)),
        **fields,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("wish", "known", "enabled", "says"),
    [
        ("gil", engine(), False, "chaos is off"),
        ("melt", engine(), True, "no fault 'melt'"),
        ("gil", None, True, "has no process now"),
        ("gil", engine(members=dict), True, "has no process now"),
    ],
)
def test_what_may_not_be_done_is_refused(wish, known, enabled, says):
    """Off, unknown, or nothing there: one sentence each, before anything is touched."""
    with pytest.raises(StallwatchError, match=says):
        desk.allowed(desk.Wish(wish), known, name="chat", enabled=enabled)


def test_a_fault_outlasts_the_limit_it_breaks():
    """Without --for: the limit of the phase and ten seconds more; slow steps stay under the limit."""
    order, aim = desk.aimed(desk.Wish("block", "worker:0/model"), engine())
    assert (order.seconds, aim.lane) == (14.0, "model")
    slow, _ = desk.aimed(desk.Wish("slow", "worker:0/model"), engine())
    assert 0 < slow.delay_s < 4.0
    long, _ = desk.aimed(desk.Wish("block", for_s=1e9), engine())
    assert long.seconds == 3600.0


HEADER = '''"""About."""

# /// scenario
# kind = "GIL_HELD"
# culprit = "worker:{odd}/model"
# action = "restart"
# limits = { default = "1500ms" }
# ranks = 4
# ///
'''


def test_a_header_is_read(tmp_path):
    """Kind, culprit, action, limits: from the comment block of the program."""
    path = tmp_path / "k08.py"
    path.write_text(HEADER)
    found = scenario.read(path)
    assert (found.kind, found.action, found.ranks) == ("GIL_HELD", "restart", 4)
    assert found.limits == {"default": "1500ms"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print(1)\n", "has no scenario header"),
        (HEADER.replace('kind = "GIL_HELD"', "kind ="), "is no TOML"),
        (HEADER.replace("ranks = 4", 'do = "suspend"'), "needs do"),
        ("\xff", "cannot be read"),
    ],
)
def test_what_is_no_scenario_is_refused(tmp_path, text, says):
    """No header, a broken one, or one that asks for what only the test suite does."""
    path = tmp_path / "x.py"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(StallwatchError, match=says):
        scenario.read(path)


def test_every_program_of_the_suite_is_read_or_refused_in_words():
    """The installed reader knows every header of tests/scenarios, or says what it cannot do."""
    said = [_said(p) for p in sorted((ROOT / "tests/scenarios/programs").glob("[kf]??_*.py"))]
    assert {x for x in said if x not in set(Kind)} <= {"", "refused"}
    assert len(said) > 2 * said.count("refused")


def _said(path: Path) -> str:
    """The kind of a program's header; "refused" for one that is done from outside."""
    try:
        return scenario.read(path).kind
    except StallwatchError as error:
        return "refused" if "done from outside" in error.message else error.message


def test_engines_without_the_variable_never_load_the_hook():
    """attach() without STALLWATCH_CHAOS: the module is not imported and no mark is wrapped."""
    code = (
        "import sys; from stallwatch import heartbeat\n"
        "from stallwatch.heartbeat.lane import Lane\n"
        "before = Lane.marker\n"
        "heartbeat.attach(role='worker').lane('x').marker('y')()\n"
        "assert Lane.marker is before\n"
        "assert 'stallwatch.heartbeat.chaos' not in sys.modules"
    )
    env = {"PYTHONPATH": str(ROOT / "supervisor"), "STALLWATCH_BOARD": "/nowhere"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, env=env)
