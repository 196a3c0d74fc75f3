"""Compile everything before serving: one task per kernel and shape, each a call on data nobody keeps.

Every op registers, beside its typed spec, how calls of that spec are warmed up. The engine hands its specs and
shapes to `tasks`, and to `run` two callbacks, with which it marks its phases; nothing here knows a heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stallwatch_kernels import jit

S = TypeVar("S")
Makers = dict[type[Any], Callable[[Any, "Shapes"], Iterable["Task"]]]

_MAKERS: Makers = {}


class WarmupFailed(RuntimeError):
    """A task of the warm-up raised: the op cannot serve. `task` names it; the cause is chained."""

    def __init__(self, task: str, cause: BaseException) -> None:
        super().__init__(f"warm-up of {task} failed: {type(cause).__name__}: {cause}")
        self.task = task


class UnknownSpec(TypeError):
    """A spec of a type for which no op registered a warm-up."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the engine will ask for: row counts of a step, requests at once, tokens of the longest one."""

    rows: tuple[int, ...] = (1,)
    requests: int = 1
    context: int = 16

    def __post_init__(self) -> None:
        if not self.rows or min((*self.rows, self.requests, self.context)) < 1:
            raise ValueError(f"warm-up shapes must be positive, got {self}")


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to warm up. `run` may be called once and keeps nothing."""

    name: str
    run: Callable[[], object]


def of(spec_type: type[S]) -> Callable[[Callable[[S, Shapes], Iterable[Task]]], Any]:
    """Register the decorated function as the maker of the tasks for specs of this type.

    A spec can only be built by importing its module, so whoever holds one has it registered.
    """

    def register(maker: Callable[[S, Shapes], Iterable[Task]]) -> Any:
        _MAKERS[spec_type] = maker
        return maker

    return register


def tasks(specs: Sequence[object], shapes: Shapes) -> list[Task]:
    """The tasks of all specs, in their order, each name once (equal specs are warmed up once)."""
    found: dict[str, Task] = {}
    for spec in specs:
        maker = _MAKERS.get(type(spec))
        if maker is None:
            known = ", ".join(sorted(t.__name__ for t in _MAKERS)) or "none"
            raise UnknownSpec(f"no warm-up for {type(spec).__name__}; known specs: {known}")
        for task in maker(spec, shapes):
            found.setdefault(task.name, task)
    return list(found.values())


def run(
    todo: Iterable[Task],
    on_start: Callable[[Task], object] = lambda _task: None,
    on_done: Callable[[Task], object] = lambda _task: None,
) -> dict[str, tuple[str, ...]]:
    """Run the tasks in order; `on_start` is called before each one can block, `on_done` after.

    Returns what was compiled on the way: kernel -> argument types that it had no code for before. Raises
    WarmupFailed at the first task that raises.
    """
    before = jit.signatures()
    for task in todo:
        on_start(task)
        try:
            task.run()
        except Exception as error:
            raise WarmupFailed(task.name, error) from error
        on_done(task)
    return grown(before, jit.signatures())


def grown(
    before: dict[str, tuple[str, ...]], after: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """The signatures in `after` that are not in `before`. Empty over a served request, or it compiled."""
    new = {
        name: tuple(s for s in found if s not in before.get(name, ()))
        for name, found in after.items()
    }
    return {name: found for name, found in new.items() if found}
