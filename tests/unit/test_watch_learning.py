"""Learnt limits of an engine: kept in its state directory, used below what was configured."""

from __future__ import annotations

import os

import pytest

from stallwatch.board.image import BoardImage, PauseLease
from stallwatch.daemon.learning import Learning
from stallwatch.testing.snapshots import frame, lane, ns, process, snapshot
from stallwatch.watch.learned import ENOUGH, FLOOR_NS
from stallwatch.watch.policy import Policy, S
from stallwatch.watch.snapshot import Recall, Snapshot


def look(at: int, *, steps: int = 99) -> Snapshot:
    """A step that began a second ago, and one more each two seconds."""
    seen = snapshot(at, [lane("model", frame("decode", at=at - 1))], recall=Recall(steps=steps))
    assert isinstance(seen.image, BoardImage)
    return seen


def teach(learning: Learning, seconds: int, **what) -> list[bool]:
    return [
        learning.turn(look(at, steps=what.get("steps", 99)), serving=what.get("serving", True),
                      compile_steps=5)
        for at in range(2, 2 * seconds, 2)
    ]  # fmt: skip


def test_what_was_learnt_is_in_force_for_the_next_daemon(tmp_path):
    """A thousand steps of a second: the floor instead of the default, by a private file."""
    told: list[str] = []
    first = Learning(tmp_path, "chat", {}, told.append)
    assert sum(teach(first, ENOUGH + 50)) >= 2
    again = Learning(tmp_path, "chat", {}, told.append)
    assert again.policy(Policy()).limit(frame("decode")) == FLOOR_NS
    assert again.policy(Policy(phases={"decode": 7 * S})).limit(frame("decode")) == 7 * S
    assert os.stat(tmp_path / "learned" / "chat.json").st_mode & 0o077 == 0
    assert told == []


@pytest.mark.parametrize("what", [{"serving": False}, {"steps": 4}])
def test_nothing_is_learnt_under_suspicion_or_while_shapes_compile(tmp_path, what):
    """Only a serving engine past its first steps teaches what is usual."""
    learning = Learning(tmp_path, "chat", {}, print)
    assert not any(teach(learning, ENOUGH + 50, **what))
    assert not (tmp_path / "learned").exists()


@pytest.mark.parametrize("how", ["lease", "debugger", "stopped", "operator"])
def test_what_was_held_up_teaches_nothing(tmp_path, how):
    """A step of ten minutes under a pause, a debugger or SIGSTOP raises no limit, also afterwards."""
    learning = Learning(tmp_path, "chat", {}, print)
    teach(learning, ENOUGH + 50)
    at = 2 * (ENOUGH + 60)
    recall = Recall(
        steps=99,
        traced_since_ns={100: ns(at)} if how == "debugger" else {},
        stopped_since_ns={100: ns(at)} if how == "stopped" else {},
    )
    pause = PauseLease("weights", "trainer", ns(at), ns(at + 9000)) if how == "lease" else None
    step = lane("model", frame("decode", at=at))
    for n in range(0, 600, 10):
        seen = snapshot(at + n, [step], processes=[process(pause=pause)], recall=recall)
        learning.turn(seen, serving=True, compile_steps=5, raised=how == "operator")
    for n in (600, 602):  # it is free again, and the step ends
        free = [step] if n == 600 else [lane("model", frame("decode", at=at + n))]
        seen = snapshot(at + n, free, processes=[process()], recall=Recall(steps=99))
        learning.turn(seen, serving=True, compile_steps=5)
    assert learning.policy(Policy()).limit(frame("decode")) == FLOOR_NS


def test_who_configures_the_default_chose_every_limit(tmp_path):
    """A configured default of a second is not raised to the floor by what was learnt."""
    learning = Learning(tmp_path, "chat", {"default": 1.0}, print)
    assert not any(teach(learning, ENOUGH + 50))
    policy = Policy(default_ns=ns(1))
    assert learning.policy(policy) is policy


def test_a_damaged_file_is_told_and_forgotten(tmp_path):
    """It is no reason not to start."""
    told: list[str] = []
    (tmp_path / "learned").mkdir()
    (tmp_path / "learned" / "chat.json").write_text("{")
    learning = Learning(tmp_path, "chat", {}, told.append)
    assert len(told) == 1
    assert learning.policy(Policy()).limit(frame("decode")) == 60 * S
