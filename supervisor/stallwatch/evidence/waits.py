"""Who waits for whom, as lines: a circle first, then every edge. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MAX_EDGES = 256


def lines(edges: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The edges of a stored wait graph."""
    if found := circle(edges):
        yield f"in a circle: {' -> '.join(found)}"
    if not edges:
        yield "no lane has named another one that it waits for"
    for edge in edges:
        why = f"  ({edge['why']})" if edge.get("why") else ""
        yield f"{edge.get('waiter', '?')} -> {edge.get('target', '?')}{why}"


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
