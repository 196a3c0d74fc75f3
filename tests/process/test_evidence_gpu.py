"""Device facts from vendors' tools, including tools that hang or answer nonsense."""

from __future__ import annotations

import time

import pytest

from stallwatch.evidence import gpu
from stallwatch.evidence.tool import ToolRegistry

pytestmark = pytest.mark.process


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Puts shell scripts in place of the vendors' tools."""
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o700)

    return put


def test_nvidia_devices_and_holders(tools):
    """One row a device with utilisation and power, and who holds its memory."""
    tools(
        "nvidia-smi",
        'case "$1" in *compute-apps*) echo "123, GPU-1, 70000";; *) '
        'echo "0, GPU-1, NVIDIA H100, 96, 10, 70000, 81559, 115.20, 700.00, 40, 1980, P0";; esac',
    )
    found = gpu.facts(ToolRegistry())
    assert found["available"]
    assert found["devices"][0]["utilization.gpu"] == "96"
    assert found["devices"][0]["power.draw"] == "115.20"
    assert found["holders"] == [{"pid": "123", "uuid": "GPU-1", "memory.used": "70000"}]


@pytest.mark.slow
def test_a_hanging_tool_costs_its_deadline(tools):
    """nvidia-smi that never answers: not available within the deadline, and why."""
    tools("nvidia-smi", "exec sleep 600")
    registry = ToolRegistry()
    began = time.monotonic()
    found = gpu.facts(registry, deadline_s=0.4)
    assert time.monotonic() - began < 2
    assert not found["available"]
    assert "did not finish" in found["why"]
    assert not registry.pids()


def test_a_failing_tool_gives_its_own_words(tools):
    """What the tool says on standard error is kept, cleaned."""
    tools("nvidia-smi", "printf 'NVML: Driver/library version mismatch\\033[0m\\n' >&2; exit 18")
    found = gpu.facts(ToolRegistry())
    assert "status 18: NVML: Driver/library version mismatch?[0m" in found["why"]


@pytest.mark.parametrize("tool", ["rocm-smi", "amd-smi", "hy-smi"])
def test_other_vendors_speak_json(tools, tool):
    """rocm-smi, amd-smi and hy-smi: two levels of their JSON as plain strings."""
    tools(tool, """echo '{"card0": {"GPU use (%)": "97", "power": {"watts": 15}}}'""")
    found = gpu.facts(ToolRegistry())
    assert found["tool"] == tool
    assert found["devices"] == [{"index": "card0", "GPU use (%)": "97", "power.watts": "15"}]


@pytest.mark.parametrize("answer", ["not json", "[[[[", '"text"', "17", "null", ""])
def test_nonsense_raises_nothing(tools, answer):
    """Whatever a tool prints, the answer is a dict that says whether there is a device."""
    tools("rocm-smi", f"printf '%s' '{answer}'")
    assert "available" in gpu.facts(ToolRegistry())
