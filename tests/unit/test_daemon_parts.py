from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from stallwatch.config.load import build
from stallwatch.daemon.counters import Totals
from stallwatch.daemon.events import EventRing, rfc3339
from stallwatch.daemon.main import refuse_other_changes
from stallwatch.daemon.persist import EngineMemory
from stallwatch.errors import ConfigError
from stallwatch.lifecycle.budget import Budget
from stallwatch.testing.clock import FakeClock


@pytest.fixture
def ring() -> EventRing:
    return EventRing(FakeClock(), capacity=4)


class TestEventRing:
    def test_ids_grow_by_one_and_old_events_fall_out(self, ring: EventRing) -> None:
        """The ring keeps the latest events; their ids have no gap and never repeat."""
        for number in range(10):
            ring.emit("chat", "state", str(number))

        assert [e.id - ring.begin for e in ring.after(0)] == [7, 8, 9, 10]
        assert [e.message for e in ring.after(ring.begin + 8)] == ["8", "9"]
        assert ring.after(ring.begin + 10) == []

    def test_ids_of_a_later_daemon_are_above_all_of_an_earlier_one(self) -> None:
        """A client that comes back with its last id, or any older one, misses nothing that is new."""
        clock = FakeClock()
        first = EventRing(clock)
        seen = [first.emit("chat", "log", str(number)).id for number in range(5000)]
        clock.advance(0.01)  # nothing starts faster than this
        second = EventRing(clock)
        new = [second.emit("chat", "state", str(number)).id for number in range(3)]

        assert all([e.id for e in second.after(last)] == new for last in (seen[0], seen[-1]))
        assert seen[-1] < new[0] < 2**53

    def test_a_waiter_is_woken_by_the_next_event(self, ring: EventRing) -> None:
        """wait() returns what was emitted while it waited, long before its timeout."""
        found: list[str] = []
        waiting = threading.Event()

        def wait() -> None:
            waiting.set()
            found.extend(e.message for e in ring.wait(0, 20.0))

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(5)
        ring.emit("chat", "stall", "here")
        thread.join(5)

        assert found == ["here"]

    def test_waiting_for_nothing_ends_at_its_timeout(self, ring: EventRing) -> None:
        """A wait without an event returns an empty list."""
        assert ring.wait(0, 0.01) == []

    def test_times_are_rfc_3339_in_utc(self) -> None:
        """Machines sort these strings."""
        assert rfc3339(0.5) == "1970-01-01T00:00:00.500Z"


class TestTotals:
    def test_counts_by_label_and_each_latency_is_read_once(self) -> None:
        """Counters grow; a latency is exported by one scrape only."""
        totals = Totals()
        totals.add("stalls", "chat", "GIL_HELD")
        totals.add("stalls", "chat", "GIL_HELD")
        totals.add("withdrawn", "chat")
        totals.observe("detection", "chat", 0.1)

        first = totals.read(looks=3, late_looks=1, log_dropped={"chat": 2})
        second = totals.read(looks=3, late_looks=1, log_dropped={})

        assert first.stalls == second.stalls == {("chat", "GIL_HELD"): 2}
        assert first.withdrawn == {"chat": 1}
        assert first.detection_s == [("chat", 0.1)]
        assert second.detection_s == []
        assert (first.looks, first.late_looks, first.log_dropped) == (3, 1, {"chat": 2})


class TestEngineMemory:
    def test_a_budget_survives(self, tmp_path: Path) -> None:
        """What one daemon spent, the next one knows, and it counts incarnations on."""
        told: list[str] = []
        clock = FakeClock()
        EngineMemory(tmp_path, "chat", clock, told.append).save(
            Budget().restarted(clock.monotonic_ns()), 7
        )

        budget, number = EngineMemory(tmp_path, "chat", clock, told.append).load(Budget())

        assert number == 7
        assert budget.in_window(clock.monotonic_ns()) == 1
        assert told == []

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"incarnation": -3, "budget": 5}', "\x00"])
    def test_nonsense_in_the_file_is_a_new_beginning(self, tmp_path: Path, text: str) -> None:
        """A damaged file never stops a daemon; at worst the budget begins anew."""
        (tmp_path / "engines").mkdir()
        (tmp_path / "engines" / "chat.json").write_text(text)

        budget, number = EngineMemory(tmp_path, "chat", FakeClock(), lambda _: None).load(Budget())

        assert (budget.stamps, number) == ((), 0)

    def test_a_disk_that_refuses_is_told_once(self, tmp_path: Path) -> None:
        """The same trouble at every save is one sentence, until it is over."""
        told: list[str] = []
        memory = EngineMemory(tmp_path, "chat", FakeClock(), told.append)
        (tmp_path / "engines").write_text("a file in the folder's place")

        memory.save(Budget(), 1)
        memory.save(Budget(), 2)

        assert len(told) == 1
        assert "budget" in told[0]

    def test_the_file_is_private(self, tmp_path: Path) -> None:
        """0600, and whole at any time: it is written by rename."""
        EngineMemory(tmp_path, "chat", FakeClock(), lambda _: None).save(Budget(), 1)

        path = tmp_path / "engines" / "chat.json"
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text())["incarnation"] == 1


def config(**keys: object) -> object:
    return build({"engines": {"chat": {"command": ["x"], **keys}}}, source="f.toml")


class TestReload:
    def test_limits_restart_and_enforce_may_change(self) -> None:
        """A reload that touches only these is accepted."""
        refuse_other_changes(
            config(),
            config(limits={"default": "5s"}, restart={"budget": 2}, enforce="observe"),
        )

    @pytest.mark.parametrize(
        ("keys", "name"), [({"port": 8001}, "port"), ({"command": ["y"]}, "command")]
    )
    def test_anything_else_is_refused_by_name(self, keys: dict[str, object], name: str) -> None:
        """The error names engine and key: the running engine was not made with it."""
        with pytest.raises(ConfigError, match=rf"engines\.chat.*{name}"):
            refuse_other_changes(config(), config(**keys))
