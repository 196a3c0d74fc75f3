"""Limits by phase name take any name: a likely slip gets a remark, never an error."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stallwatch.config import from_command
from stallwatch.config.remarks import near_misses

ENGINE = Path(__file__).parents[2] / "engine" / "stallwatch_engine"


def remarks(*names: str) -> list[str]:
    limits = dict.fromkeys(names, "10s")
    return near_misses(from_command(["true"], overrides={"engine": {"limits": limits}})[0])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("defaul", "default"),
        ("Default", "default"),
        ("start-silence", "start_silence"),
        ("no_progres", "no_progress"),
        ("prefil", "prefill"),
        ("execute_modle", "execute_model"),
    ],
)
def test_a_near_miss_is_told_with_the_likely_name(written, meant):
    """The table, the key as it was written, what it is taken for, and the name that was meant."""
    (told,) = remarks(written)
    assert told == (
        f"[engines.engine.limits] {written!r} limits phases of that name only: "
        f"did you mean {meant!r}?"
    )


def test_names_that_are_known_or_far_from_it_are_no_slips():
    """Keys of the table, phases with a default, phases of vLLM, and a phase of one's own."""
    assert remarks("default", "start", "prefill", "execute_model", "code2wav", "my_phase") == []


def test_no_phase_that_our_own_engine_marks_is_taken_for_a_slip():
    """A remark on a name that is right would teach operators not to read remarks."""
    calls = ("enter", "marker", "pusher", "push", "phase", "Row")
    found: set[str] = set()
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                at = 2 if name == "Row" else 0
                first = node.args[at] if name in calls and len(node.args) > at else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value)
    assert {"execute_model", "load_model", "out_copy", "prefault"} <= found
    assert remarks(*sorted(found)) == []
