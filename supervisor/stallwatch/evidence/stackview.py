"""Merged stacks as lines: the culprit's first, idle threads last, and an end to the list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stallwatch.evidence.stacktree import StackClass, classes

_CLASSES = 20
_FRAMES = 12
# Where every idle Python thread sits or begins: never what a reader looks for first.
_DULL = ("_bootstrap", "Thread.run (", "<module> (", "_run_code (", "_run_module_as_main (")
_IDLE = ("Condition.wait (", "Event.wait (", "Queue.get (", "_worker (", "select (", "poll (")
_OURS = re.compile(
    r"\((?:.*/)?(?:stallwatch_engine/(?:vllm_plugin/|phasemap\.py|hcu\.py)|stallwatch/heartbeat/)"
)
_LINE = re.compile(r":\d+\)$")
_PYTHON = re.compile(r"\.(?:py|pyx|pyi|pyc):\d+\)$|\(<[^)]*\)$")


def lines(
    tree: Mapping[str, Any], culprit: Mapping[str, Any] | None = None, limit: int = 0
) -> Iterator[str]:
    """One class of threads after the other; `limit` lines at most when it is not 0."""
    found = list(classes(tree))
    found.sort(key=lambda one: _rank(one, culprit or {}))
    out = [list(_one(one)) for one in found[:_CLASSES]]
    left = limit or sum(map(len, out))
    shown = 0
    for block in out:
        if len(block) > left and shown:
            break
        yield from block[:left]
        left -= len(block)
        shown += 1
    if (rest := len(found) - shown) > 0:
        places = "place where threads stand was" if rest == 1 else "places where threads stand were"
        yield f"... {rest} more {places} left out: `-o json` has all"


def _one(one: StackClass) -> Iterator[str]:
    plural = "thread" if one.threads == 1 else "threads"
    yield f"[{', '.join(one.members)}] {one.threads} {plural}"
    telling = _telling(one.frames)
    for frame in telling[:_FRAMES]:
        yield f"    {frame}"
    if len(telling) > _FRAMES:
        yield f"    ... {len(telling) - _FRAMES} more"


def _telling(frames: Sequence[str]) -> list[str]:
    """Without our wrappers, without what every thread begins with, repeated lines once."""
    own = [f for f in frames if not _OURS.search(f)] or list(frames)
    last = max((i for i, f in enumerate(own) if _PYTHON.search(f)), default=len(own) - 1)
    inner = own[: last + 1]  # the C frames below the first Python one start every thread
    telling = [f for f in inner if not any(dull in f for dull in _DULL)] or inner
    return [f for i, f in enumerate(telling) if i == 0 or telling[i - 1] != f]


def _rank(one: StackClass, culprit: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    frame = str(culprit.get("frame") or "")
    mine = any(_holds(member, culprit) for member in one.members)
    there = (mine or not culprit.get("pid")) and bool(frame) and _stands(frame, one.frames)
    return not there, _idle(one.frames), not mine


def _stands(frame: str, frames: Sequence[str]) -> bool:
    """A loop is on another line of its function in each sample: the line does not decide."""
    place = _LINE.sub("", frame)
    return any(_LINE.sub("", each) == place for each in frames)


def _idle(frames: Sequence[str]) -> bool:
    python = [f for f in frames if _PYTHON.search(f)] or list(frames)
    return not python or any(idle in python[0] for idle in _IDLE)


def _holds(member: str, culprit: Mapping[str, Any]) -> bool:
    """Does 'worker:0-2,5' hold the culprit?"""
    role, _, ranks = member.rpartition(":")
    wanted = culprit.get("pid") if role == "pid" else culprit.get("rank")
    if role != "pid" and role != culprit.get("role"):
        return False
    return isinstance(wanted, int) and any(_within(part, wanted) for part in ranks.split(","))


def _within(part: str, number: int) -> bool:
    first, _, last = part.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal()):
        return False
    return int(first[:9]) <= number <= int(last[:9])
