"""Phases of one operation that replace each other: name, details and deadline are new at each step.

Nested phases (phasemap) keep the clock of the outer one, so a long operation of many short steps ends
up over the outer limit. Here the operation is one phase of the lane below the phase of its RPC, and
each step takes its place: a step that begins has its whole limit, and after it the step around it
begins again. A stall is then told once, with the step and the sizes at which it stands.

Standard library only, Python 3.11 syntax: copies of this file run in other environments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from stallwatch_engine.phasemap import HERE, LaneLike, Lanes, Mark, Wrap, bound

Chosen = Callable[[Sequence[Any], dict[str, Any]], str]
_Frame = tuple[Mark, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Size:
    """One integer detail: a dimension of the argument's shape, or its length.

    Sizes only: neither text nor audio ever leaves the engine.
    """

    name: str
    position: int
    keyword: str
    dim: int | None = None  # None: len()

    def read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """-1 when another version calls it otherwise: a missing detail is not worth a step."""
        try:
            value = args[self.position] if self.position < len(args) else kwargs[self.keyword]
            if self.dim is not None:
                return int(value.shape[self.dim])
            return value if isinstance(value, int) else len(value)
        except Exception:
            return -1


@dataclass(slots=True)
class Stage:
    """The steps in which the threads of this process are. One per phase map."""

    limit_s: float = 0.0  # of every step; 0: the supervisor's limits for their names
    _open: dict[int, list[_Frame]] = field(default_factory=dict)  # by thread, outermost first

    def step(
        self, phase: str, *sizes: Size, cls: str = "work", choose: Chosen | None = None
    ) -> Wrap:
        """A wrapper that is in `phase` while the function runs.

        choose: picks a more exact name from the arguments, out of a small fixed set.
        """

        def wrap(function: Callable[..., Any], lanes: Lanes) -> Callable[..., Any]:
            marks = bound(lanes, HERE, lambda lane: _Marks(lane, self.limit_s, sizes, cls))

            @functools.wraps(function)
            def stepped(*args: Any, **kwargs: Any) -> Any:
                found = marks()
                if found is None:
                    return function(*args, **kwargs)
                name = choose(args, kwargs) if choose is not None else phase
                values = tuple(size.read(args, kwargs) for size in sizes)
                self._begin(found, name, values)
                try:
                    return function(*args, **kwargs)
                finally:
                    self._end(found)

            return stepped

        return wrap

    def _begin(self, marks: _Marks, phase: str, values: tuple[int, ...]) -> None:
        around = self._open.setdefault(get_ident(), [])
        push, enter = marks.of(phase)
        (enter if around else push)(*values)
        around.append((enter, values))

    def _end(self, marks: _Marks) -> None:
        around = self._open[get_ident()]
        around.pop()
        if around:
            enter, values = around[-1]
            enter(*values)
        else:
            marks.pop()


class _Marks:
    """What one function's steps call on one lane, bound once for each name."""

    __slots__ = ("_cls", "_known", "_lane", "_limit", "_names", "pop")

    def __init__(self, lane: LaneLike, limit_s: float, sizes: Sequence[Size], cls: str) -> None:
        self._lane, self._limit, self._cls = lane, limit_s or None, cls
        self._names = [size.name for size in sizes]
        self._known: dict[str, tuple[Mark, Mark]] = {}
        self.pop = lane.pop

    def of(self, phase: str) -> tuple[Mark, Mark]:
        """(push below the current phase, enter in its place)."""
        found = self._known.get(phase)
        if found is None:
            options: dict[str, Any] = {"cls": self._cls, "limit": self._limit}
            found = self._known[phase] = (
                self._lane.pusher(phase, *self._names, **options),
                self._lane.marker(phase, *self._names, **options),
            )
        return found
