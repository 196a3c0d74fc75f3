"""One call-graph prefix tree over all processes: who is where, and who is different (LLNL STAT)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stallwatch.evidence.clean import clean
from stallwatch.evidence.model import Frame, ProcessEvidence
from stallwatch.evidence.redact import redact

MAX_NODES = 2000
MAX_DEPTH = 128
_TEXT_DEPTH = 24  # deeper branches are not indented any further


@dataclass(slots=True)
class _Node:
    frame: str
    threads: int = 0
    members: dict[str, set[int]] = field(default_factory=dict)  # role -> ranks
    ends: int = 0  # threads whose innermost frame this is
    at: dict[str, set[int]] = field(default_factory=dict)  # the members of those threads
    children: dict[str, _Node] = field(default_factory=dict)

    def add(self, role: str, rank: int) -> None:
        self.threads += 1
        self.members.setdefault(role, set()).add(rank)


def build(stacks: Mapping[int, ProcessEvidence]) -> dict[str, Any]:
    """The tree as JSON, root frame "".

    A node: frame, members and threads that passed it, `ends` threads (of members `at`) whose
    innermost frame it is, children.
    """
    root = _Node("")
    nodes = 1
    for evidence in stacks.values():
        target = evidence.target
        role, rank = (target.role, target.rank) if target.role else ("pid", target.pid)
        for thread in evidence.threads:
            node = root
            node.add(role, rank)
            for frame in reversed(thread.frames[:MAX_DEPTH]):
                text = _label(frame)
                below = node.children.get(text)
                if below is None:
                    if nodes >= MAX_NODES:
                        break
                    below = node.children[text] = _Node(text)
                    nodes += 1
                below.add(role, rank)
                node = below
            node.ends += 1
            node.at.setdefault(role, set()).add(rank)
    return _as_json(root)


def _label(frame: Frame) -> str:
    """A frame in words. An address without a name differs in every process: its library does not."""
    if frame.name.startswith("0x"):
        return clean(redact(f"?? ({frame.filename})"))
    return clean(redact(str(frame)))


def _as_json(node: _Node) -> dict[str, Any]:
    children = sorted(node.children.values(), key=lambda n: (-n.threads, n.frame))
    return {
        "frame": node.frame,
        "members": members(node.members),
        "threads": node.threads,
        "ends": node.ends,
        "at": members(node.at),
        "children": [_as_json(child) for child in children],
    }


def members(by_role: Mapping[str, set[int]]) -> list[str]:
    """{'worker': {0, 1, 2, 5}} -> ['worker:0-2,5']."""
    return [f"{role}:{ranks(found)}" for role, found in sorted(by_role.items())]


def ranks(found: set[int]) -> str:
    """{0, 1, 2, 5} -> '0-2,5'."""
    runs: list[list[int]] = []
    for rank in sorted(found):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def lines(tree: Mapping[str, Any], limit: int = 200) -> Iterator[str]:
    """The tree as text, outermost first. A new indent only where paths part, so it stays narrow."""
    todo: list[tuple[Mapping[str, Any], int, list[str] | None]] = [
        (child, 0, None) for child in reversed(_children(tree))
    ]
    written = 0
    while todo:
        node, indent, above = todo.pop()
        if written >= limit:
            yield f"... {len(todo) + 1} more branches"
            return
        who = [clean(str(m), 120) for m in node.get("members", ())]
        label = "" if who == above else f"  [{', '.join(who)}]"
        yield f"{'  ' * min(indent, _TEXT_DEPTH)}{clean(str(node.get('frame', '?')))}{label}"
        written += 1
        below = _children(node)
        deeper = indent + (1 if len(below) > 1 or (below and node.get("ends")) else 0)
        todo += [(child, deeper, who) for child in reversed(below)]


def _children(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = node.get("children")
    return [c for c in found if isinstance(c, Mapping)] if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class StackClass:
    """Threads that stand in exactly the same place. Frames innermost first."""

    members: tuple[str, ...]
    threads: int
    frames: tuple[str, ...]


def classes(tree: Mapping[str, Any]) -> Iterator[StackClass]:
    """Every place of the tree where threads stand, in the order of the tree."""
    todo: list[tuple[Mapping[str, Any], tuple[str, ...]]] = [(tree, ())]
    while todo:
        node, above = todo.pop()
        frame = str(node.get("frame", ""))
        path = (frame, *above) if frame else above
        if ends := node.get("ends"):
            yield StackClass(tuple(str(m) for m in node.get("at", ())), int(ends), path[:MAX_DEPTH])
        if len(path) <= MAX_DEPTH:
            todo += [(child, path) for child in reversed(_children(node))]
