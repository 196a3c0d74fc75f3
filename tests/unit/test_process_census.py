from __future__ import annotations

import pytest

from stallwatch.process.census import Census

S = 1_000_000_000


class Host:
    """A /proc of plain files, and a clock."""

    def __init__(self, path) -> None:
        self.path = path
        self.now = 0
        self.cost = 0
        self.last = 0

    def monotonic_ns(self) -> int:
        self.now += self.cost
        return self.now

    def wall(self) -> float:
        return 0.0

    def born(self, pid: int, *, ticks: int = 1) -> None:
        (self.path / str(pid)).mkdir(exist_ok=True)
        fields = ["S", "1", "1", "1", *"0" * 14, "1", "0", str(ticks), "0", "0"]
        fields[17], fields[19] = "1", str(ticks)
        (self.path / str(pid) / "stat").write_text(f"{pid} (x) {' '.join(fields)}")
        self.last = pid
        (self.path / "loadavg").write_text(f"0 0 0 1/9 {pid}\n")


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    host.born(10)
    return host


@pytest.fixture
def census(host):
    census = Census(clock=host, proc=host.path)
    census.look(full=True)
    yield census
    census.close()


def pids(stats):
    return [s.pid for s in stats]


def test_only_the_newborn_are_named(host, census):
    """A process is named once, oldest first."""
    host.born(12, ticks=9)
    host.born(11, ticks=5)
    host.last = 12

    assert pids(census.look()) == [11, 12]
    assert census.look() == []


def test_nothing_born_means_nothing_listed(host, census):
    """While no pid was given out, /proc is listed once a second only."""
    census.look()
    (host.path / "99").mkdir()  # appears without a new last pid, as behind lxcfs
    (host.path / "99" / "stat").write_text((host.path / "10" / "stat").read_text())
    host.now += S // 10
    assert census.look() == []
    host.now += S

    assert len(census.look()) == 1


def test_a_crowded_host_is_listed_less_often(host, census):
    """A listing that takes 2 ms is made once a second at most, and the birth is not forgotten."""
    host.cost = 2_000_000
    host.born(11)
    assert pids(census.look()) == [11]
    host.born(12)
    host.now += S // 2
    assert census.look() == []
    host.now += S
    assert pids(census.look()) == [12]


def test_a_reused_pid_is_seen_by_the_full_look(host, census):
    """Everything is read again after five seconds."""
    host.now += 6 * S

    assert pids(census.look()) == [10]


def test_a_full_look_never_waits(host, census):
    """Before a kill all are read, whatever the last look cost."""
    host.cost = 10_000_000
    host.born(11)
    census.look()

    assert pids(census.look(full=True)) == [10, 11]
