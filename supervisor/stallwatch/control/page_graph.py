"""The wait-for graph as SVG: who waits for whom, left to right. Drawn here, so it needs no script. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stallwatch.control.page_markup import Html, el

MAX_NODES = 40
_WIDE, _HIGH = 190, 34  # a box
_GAP_X, _GAP_Y = 70, 18
_LETTERS = 25  # of a name that fit in a box
_MARGIN = 12


def edges_of(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(waiter, target, why) of every edge of a report, whatever else it holds."""
    graph = report.get("wait_graph")
    found = graph.get("edges") if isinstance(graph, Mapping) else None
    return [
        (str(e.get("waiter", "")), str(e.get("target", "")), str(e.get("why", "")))
        for e in (found if isinstance(found, list) else [])
        if isinstance(e, Mapping)
    ]


def layers(edges: Sequence[tuple[str, str, str]]) -> list[list[str]]:
    """Nodes in columns: a waiter stands left of what it waits for, members of a cycle as they come.

    Breadth first from those that nobody waits for; a cycle without such a node begins at its first
    edge. Every node is in exactly one column.
    """
    below: dict[str, list[str]] = {}
    for waiter, target, _ in edges:
        below.setdefault(waiter, []).append(target)
        below.setdefault(target, [])
    awaited = {target for _, target, _ in edges}
    depth: dict[str, int] = {}
    for root in [n for n in below if n not in awaited] + list(below):
        if root in depth:
            continue
        depth[root], todo = 0, [root]
        while todo:
            node = todo.pop(0)
            for target in below[node]:
                if target not in depth:
                    depth[target] = depth[node] + 1
                    todo.append(target)
    columns: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node, column in depth.items():
        columns[column].append(node)
    return columns


def draw(edges: Sequence[tuple[str, str, str]], culprit: str = "") -> Html | None:
    """The picture, or None when there is nothing to draw or too much for a picture."""
    columns = layers(edges)
    if not columns or sum(map(len, columns)) > MAX_NODES:
        return None
    at = {
        node: (_MARGIN + x * (_WIDE + _GAP_X), _MARGIN + y * (_HIGH + _GAP_Y))
        for x, column in enumerate(columns)
        for y, node in enumerate(column)
    }
    width = len(columns) * (_WIDE + _GAP_X) - _GAP_X + 2 * _MARGIN
    tallest = max(map(len, columns))
    # an edge that goes back runs under everything
    height = tallest * (_HIGH + _GAP_Y) + 2 * _MARGIN + _GAP_Y
    arrow = el(
        "marker",
        el("path", d="M0 0L8 4L0 8z"),
        id="arrow", viewBox="0 0 8 8", refX=8, refY=4, markerWidth=8, markerHeight=8, orient="auto",
    )  # fmt: skip
    drawn = dict.fromkeys((waiter, target) for waiter, target, _ in edges)
    return el(
        "svg",
        el("title", "Who waits for whom"),
        el("defs", arrow),
        *(_edge(at[a], at[b], height - _MARGIN) for a, b in drawn),
        *(_box(node, place, culprit) for node, place in at.items()),
        role="img", viewBox=f"0 0 {width} {height}", width=width, height=height, class_="graph",
    )  # fmt: skip


def _box(node: str, place: tuple[int, int], culprit: str) -> Html:
    x, y = place
    shown = node if len(node) <= _LETTERS else f"{node[: _LETTERS - 1]}…"
    akin = (node == culprit, culprit.startswith(f"{node}/"), node.startswith(f"{culprit}/"))
    guilty = bool(culprit) and any(akin)
    return el(
        "g",
        el("title", node),
        el("rect", x=x, y=y, width=_WIDE, height=_HIGH, rx=6),
        el("text", shown, x=x + _WIDE // 2, y=y + _HIGH // 2 + 5),
        class_="culprit" if guilty else "node",
    )


def _edge(start: tuple[int, int], end: tuple[int, int], floor: int) -> Html:
    """A curve from the right of the waiter to the left of its target; backwards, round below."""
    x1, y1 = start[0] + _WIDE, start[1] + _HIGH // 2
    x2, y2 = end[0], end[1] + _HIGH // 2
    if x2 > x1:
        bend = (x2 - x1) // 2
        path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
    elif start == end or start[0] == end[0]:
        path = f"M{x1} {y1}C{x1 + 45} {y1} {x1 + 45} {y2 + 12} {x1} {y2 + 8}"
    else:
        x1, y1 = start[0] + _WIDE // 2, start[1] + _HIGH
        x2, y2 = end[0] + _WIDE // 2, end[1] + _HIGH
        path = f"M{x1} {y1}C{x1} {floor} {x2} {floor} {x2} {y2}"
    return el("path", d=path, class_="edge", marker_end="url(#arrow)")
