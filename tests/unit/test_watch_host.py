"""Host witnesses from a made-up /proc and cgroup tree."""

from __future__ import annotations

import pytest

from stallwatch.watch.host import HostWitness
from stallwatch.watch.snapshot import HostFacts

SECOND = 1_000_000_000


@pytest.fixture
def tree(tmp_path):
    """(proc, cgroup, write): write(path, text) puts a file under tmp_path."""

    def write(path: str, text: str) -> None:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    write("proc/self/cgroup", "")
    write("cg/.keep", "")
    return tmp_path / "proc", tmp_path / "cg", write


def facts(tree) -> HostFacts:
    proc, cgroup, _ = tree
    return HostWitness(proc=proc, cgroup=cgroup).facts(0)


def test_version_two_with_a_quota_on_an_ancestor(tree):
    """Throttling counts wherever the quota sits; PSI comes from the own cgroup."""
    _, _, write = tree
    write("proc/self/cgroup", "0::/slice/engine\n")
    write("cg/cgroup.controllers", "cpu\n")
    write("cg/slice/cpu.stat", "usage_usec 9\nthrottled_usec 700\n")
    write("cg/slice/engine/cpu.stat", "usage_usec 9\nthrottled_usec 50\n")
    write("cg/slice/engine/cgroup.freeze", "0\n")
    write("cg/slice/cgroup.freeze", "1\n")
    write("cg/slice/engine/cpu.pressure", "some avg10=0.00 total=11\nfull avg10=0.00 total=22\n")
    assert facts(tree) == HostFacts(throttled_usec=750, frozen=True, cpu_full_usec=22)


def test_version_one_counts_in_nanoseconds(tree):
    """cgroup v1: cpu.stat throttled_time in ns, freezer.state in words."""
    _, _, write = tree
    write("proc/self/cgroup", "6:freezer:/job\n1:cpu,cpuacct:/job\n0::/\n")
    write("cg/cpu/job/cpu.stat", "nr_periods 5\nnr_throttled 1\nthrottled_time 123000\n")
    write("cg/freezer/job/freezer.state", "FROZEN\n")
    write("proc/pressure/cpu", "some avg10=0.00 total=1\nfull avg10=0.00 total=2\n")
    assert facts(tree) == HostFacts(throttled_usec=123, frozen=True, cpu_full_usec=2)


def test_a_container_without_a_cgroup_namespace_falls_back_to_its_mount(tree):
    """The path of the host does not exist inside: the mount itself is the own cgroup."""
    _, _, write = tree
    write("proc/self/cgroup", "1:cpu:/docker/0123\n")
    write("cg/cpu/cpu.stat", "throttled_time 5000\n")
    assert facts(tree).throttled_usec == 5


@pytest.mark.parametrize("text", ["", "nonsense", "x:y\n:::\n0::../../../etc\n", "\x00\x01"])
def test_nothing_readable_means_unknown(tree, text):
    """Missing or damaged files are no witness and no error."""
    tree[2]("proc/self/cgroup", text)
    tree[2]("cg/cgroup.controllers", "")
    tree[2]("cg/cpu.stat", "throttled_usec minus one\nthrottled_usec\n")
    assert facts(tree) == HostFacts()


def test_files_are_read_once_a_second_and_lateness_at_every_look(tree):
    """Counters are cumulative: ten reads a second would buy nothing."""
    proc, cgroup, write = tree
    write("proc/self/cgroup", "0::/\n")
    write("cg/cgroup.controllers", "cpu\n")
    write("cg/cpu.stat", "throttled_usec 1\n")
    host = HostWitness(proc=proc, cgroup=cgroup)
    assert host.facts(0).throttled_usec == 1
    write("cg/cpu.stat", "throttled_usec 2\n")
    assert host.facts(SECOND // 2, late_ns=7) == HostFacts(7, 1)
    assert host.facts(SECOND) == HostFacts(0, 2)


def test_the_real_machine_is_readable():
    """Whatever this machine offers is read without an error."""
    assert isinstance(HostWitness().facts(0), HostFacts)
