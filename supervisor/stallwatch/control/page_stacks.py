"""The merged stack tree of a report as nested lists that open and close without a script. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stallwatch.control.page_markup import Html, el, join

MAX_NODES = 2000
_OPEN = 6  # branchings that are open at first
_DEEPEST = 128

Node = Mapping[str, Any]


def tree(root: object, culprit_frame: str = "") -> Html | None:
    """The tree below `root` (evidence.stacktree.build); None when there are no stacks."""
    children = _children(root) if isinstance(root, Mapping) else []
    if not children:
        return None
    return _branches(children, 0, [MAX_NODES], culprit_frame)


def _branches(nodes: Sequence[Node], depth: int, budget: list[int], culprit_frame: str) -> Html:
    """Siblings, as many as the budget (of frames in the whole tree) allows."""
    items: list[Html] = []
    for number, node in enumerate(nodes):
        if budget[0] <= 0 or depth >= _DEEPEST:
            rest = f"… {len(nodes) - number} more branches in the report's JSON"
            items.append(el("li", rest, class_="note"))
            break
        items.append(_branch(node, depth, budget, culprit_frame))
    return el("ul", *items, class_=None if depth else "tree")


def _branch(node: Node, depth: int, budget: list[int], culprit_frame: str) -> Html:
    """A run of frames that the same threads passed, then its branches."""
    run = [node]
    while len(below := _children(run[-1])) == 1 and not run[-1].get("ends"):
        if _members(below[0]) != _members(node) or len(run) >= _DEEPEST:
            break
        run.append(below[0])
    budget[0] -= len(run)
    threads = _number(node, "threads")
    head = el(
        "span",
        el("b", ", ".join(_members(node)) or "?"),
        f" {threads} thread{'' if threads == 1 else 's'}",
        f", {ends} stand here" if (ends := _number(run[-1], "ends")) and ends != threads else None,
        class_="who",
    )
    frames = join(_frame(each, culprit_frame) for each in run)
    if not below:
        return el("li", head, frames)
    inner = _branches(below, depth + 1, budget, culprit_frame)
    shown = el("details", el("summary", head), frames, inner, open=depth < _OPEN)
    return el("li", shown)


def _frame(node: Node, culprit_frame: str) -> Html:
    text = str(node.get("frame", "?"))
    guilty = bool(culprit_frame) and text == culprit_frame  # above it may stand native frames
    return el("code", text, class_="culprit" if guilty else None)


def _children(node: Node) -> list[Node]:
    found = node.get("children")
    return [c for c in found if isinstance(c, Mapping)] if isinstance(found, list) else []


def _members(node: Node) -> Sequence[str]:
    found = node.get("members")
    return [str(each) for each in found] if isinstance(found, list) else []


def _number(node: Node, key: str) -> int:
    found = node.get(key)
    return found if isinstance(found, int) else 0
