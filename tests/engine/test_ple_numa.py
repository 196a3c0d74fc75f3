"""Memory near the devices: each step is tried alone, verified by the kernel, and never fatal."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from stallwatch_engine.ple import numa

LIMIT_S = 60.0


def _policies() -> bool:
    try:
        numa.memory_policy()
    except OSError:
        return False
    return True


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not _policies(), reason="the kernel has no memory policies here")
def test_a_child_under_an_inherited_binding_reports_local_first():
    """A strict binding passes through exec; after settling, the kernel itself says that it is gone."""
    child = """
        import json
        from stallwatch_engine.ple import numa
        before = numa.memory_policy()
        steps = [str(step) for step in numa.settle()]
        print(json.dumps([before, numa.memory_policy(), steps]))
    """
    parent = """
        import subprocess, sys
        from stallwatch_engine.ple import numa
        numa.set_memory_policy(numa.MPOL_BIND, (0,))
        sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]], timeout=60).returncode)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(parent), textwrap.dedent(child)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    before, after, steps = json.loads(done.stdout)
    assert before == [numa.MPOL_BIND, [0]]
    assert after[0] in {numa.MPOL_DEFAULT, numa.MPOL_PREFERRED, numa.MPOL_LOCAL}
    assert "was bound to nodes 0; now local first" in steps[0]


def test_affinity_keeps_to_what_is_allowed_and_is_not_fatal():
    """A wish outside of the cpuset is left alone and said; a possible one is done."""
    allowed = os.sched_getaffinity(0)
    try:
        one = min(allowed)
        step = numa.settle(str(one))[1]
        assert step.done
        assert os.sched_getaffinity(0) == {one}
        refused = numa.settle("4094")[1]
        assert not refused.done
        assert "none of the CPUs 4094" in str(refused)
        assert os.sched_getaffinity(0) == {one}
        assert not numa.settle("zero")[1].done
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-0\n", {0})]
)
def test_cpu_lists_are_the_kernels(text, cpus):
    """Ranges and single numbers, comma separated."""
    assert numa.cpu_list(text) == cpus


def test_the_cpus_of_a_node_come_from_sysfs(tmp_path):
    """A node that the kernel does not show has none."""
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("4-7\n")
    assert numa.node_cpus(1, tmp_path) == "4-7"
    assert numa.node_cpus(2, tmp_path) == ""


def test_prefault_touches_every_page(tmp_path):
    """A mapping of a fresh sparse file has no page before, and all of them after."""
    size = 300 * mmap.PAGESIZE
    path = tmp_path / "table"
    path.write_bytes(b"")
    os.truncate(path, size)
    memory = np.memmap(path, dtype=np.uint8, mode="r")
    seen = []
    step = numa.prefault(memory, seen.append)
    if not step.done:
        pytest.skip(f"this host is short of memory: {step.detail}")
    assert numa.resident(memory) == size
    assert sum(seen) == size


def test_prefault_leaves_a_host_without_headroom_alone(monkeypatch):
    """It warns and touches nothing: a table that swaps is worse than one that loads late."""
    monkeypatch.setattr(numa, "available", lambda: numa.HEADROOM)
    seen = []
    step = numa.prefault(np.zeros(1 << 30, dtype=np.uint8), seen.append)
    assert not step.done
    assert "headroom" in step.detail
    assert seen == []


def test_a_machine_without_these_calls_is_left_as_it_is(monkeypatch):
    """Another architecture: said, not raised."""
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    step = numa.settle()[0]
    assert not step.done
    assert "riscv64" in str(step)
