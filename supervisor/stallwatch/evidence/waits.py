"""Who waits for whom, as lines: a circle that holds first, then every edge. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stallwatch.diagnosis.graph import IDLE
from stallwatch.diagnosis.kinds import Kind

_MAX_EDGES = 256


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The edges of a report's wait graph."""
    graph = report.get("wait_graph")
    edges = _rows(graph, "edges") if isinstance(graph, Mapping) else []
    if found := circle(_holding(edges, report)):
        yield f"in a circle: {' -> '.join(found)}"
    if not edges:
        yield "no lane has named another one that it waits for"
    for edge in edges:
        why = f"  ({edge['why']})" if edge.get("why") else ""
        yield f"{edge.get('waiter', '?')} -> {edge.get('target', '?')}{why}"


def _holding(
    edges: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Edges that can be part of a circle: an idle lane waits for nothing but work, and a young wait
    is what a working engine is full of. Where the verdict is that circle, its waits need not be over.
    """
    kinds = report.get("kinds")
    judged = isinstance(kinds, list) and Kind.ORDER_CYCLE in kinds
    lanes = {x.get("address"): x for p in _rows(report, "processes") for x in _rows(p, "lanes")}
    return [
        edge
        for edge in edges
        if edge.get("why") != IDLE and (judged or _over(lanes.get(edge.get("waiter"))))
    ]


def _over(lane: Mapping[str, Any] | None) -> bool:
    """A lane whose phase has outlived its limit; of a lane that the report lacks nothing speaks against it."""
    if lane is None:
        return True
    age, limit = lane.get("age_s"), lane.get("limit_s")
    if lane.get("class") == IDLE or not isinstance(age, int | float):
        return False
    return isinstance(limit, int | float) and 0 < limit <= age


def _rows(holder: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = holder.get(key)
    return [x for x in found if isinstance(x, Mapping)] if isinstance(found, list) else []


def circle(edges: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lanes of a circle, the first one again at its end; [] when there is none."""
    to: dict[str, list[str]] = {}
    for edge in edges[:_MAX_EDGES]:
        to.setdefault(str(edge.get("waiter", "?")), []).append(str(edge.get("target", "?")))
    done: set[str] = set()
    for start, targets in to.items():
        path, todo = [start], [iter(targets)]
        while todo:
            following = next(todo[-1], None)
            if following is None:
                done.add(path.pop())
                todo.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            elif following in to and following not in done:
                path.append(following)
                todo.append(iter(to[following]))
    return []
