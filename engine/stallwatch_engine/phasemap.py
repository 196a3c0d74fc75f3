"""Which function of an engine is which phase: a declarative table, and the installer that applies it.

A row says "while `module:Class.method` runs, the lane `main` of this process is in phase `schedule`".
The installer wraps what resolves, waits for modules that are not imported yet (it never imports one),
and reports what it could not find. It never raises: the caller may be `register()` of a plugin,
where an exception kills the engine.

Standard library only, Python 3.11 syntax: copies of this file run in other environments.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType
from typing import Any, Protocol, TypeVar

MARK = "__stallwatch__"
CLASSES = ("idle", "work", "wait", "start", "pause", "stop")
Mark = Callable[..., None]
HERE = "@"  # lane name: whatever lane the calling thread already has; none: no mark


class LaneLike(Protocol):
    """The part of a heartbeat lane that wrappers use."""

    pop: Callable[[], None]
    progress: Callable[..., None]

    def marker(self, phase: str, *details: str, cls: str = "work", on: str = "") -> Mark: ...
    def pusher(
        self,
        phase: str,
        *details: str,
        cls: str = "work",
        limit: float | None = None,
        on: str = "",
    ) -> Mark: ...
    def idle_marker(self, on: str = "") -> Mark: ...


class Lanes(Protocol):
    """Gives the lane of this process that the calling thread may write; None: do not mark."""

    def get(self, name: str) -> LaneLike | None: ...


Wrap = Callable[[Callable[..., Any], Lanes], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    `details` are up to two integers, "name=path": the path is an argument's position or keyword, then
    attributes, and `#` at the end for a length ("tokens=1.num_tokens", "requests=1.requests#").
    `forward`: the method may be missing on the class and reach `self.<forward>` by __getattr__; it is
    then defined. `wrap` replaces the generic wrapper where entering and leaving a phase is not enough.
    `since` is only said in reports: an older engine has no such name.
    """

    target: str  # "package.module:Qualified.name"
    lane: str
    phase: str
    cls: str = "work"
    on: str = ""
    details: tuple[str, ...] = ()
    limit_s: float = 0.0
    forward: str = ""
    wrap: Wrap | None = None
    since: str = ""

    def __post_init__(self) -> None:
        module, colon, name = self.target.partition(":")
        if not (module and colon and name):
            raise ValueError(f"phase map target {self.target!r} is not 'module:qualified.name'")
        if self.cls not in CLASSES:
            raise ValueError(f"phase map class {self.cls!r} is none of {', '.join(CLASSES)}")
        if not 0 <= self.limit_s < float("inf"):
            raise ValueError(f"phase map limit {self.limit_s!r} is not a number of seconds")
        if len(self.details) > 2:
            raise ValueError(f"phase map row {self.target!r} has more than two details")

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]


def wrap_phase(function: Callable[..., Any], row: Row, lanes: Lanes) -> Callable[..., Any]:
    """The generic wrapper: enter the phase, call, leave it, whatever happens.

    Phases nest, so recursion and wrapped callees keep the clock of the outer phase.
    """
    details = [_detail(text) for text in row.details]
    names = [name for name, _ in details]
    options: dict[str, Any] = {"cls": row.cls, "on": row.on, "limit": row.limit_s or None}
    marks = bound(
        lanes, row.lane, lambda lane: (lane.pusher(row.phase, *names, **options), lane.pop)
    )

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        found = marks()
        if found is None:
            return function(*args, **kwargs)
        push, pop = found
        push()
        try:
            return function(*args, **kwargs)
        finally:
            pop()

    @functools.wraps(function)
    def detailed(*args: Any, **kwargs: Any) -> Any:
        found = marks()
        if found is None:
            return function(*args, **kwargs)
        push, pop = found
        push(*[read(args, kwargs) for _, read in details])
        try:
            return function(*args, **kwargs)
        finally:
            pop()

    return detailed if details else plain


T = TypeVar("T")


def bound(lanes: Lanes, name: str, make: Callable[[LaneLike], T]) -> Callable[[], T | None]:
    """A function that gives the calling thread what `make` bound to its lane, or None without lane.

    Marks are bound once per thread: looking one up costs 60 ns instead of the 1 us of making it.
    """
    known: dict[int, T] = {}
    find = known.get

    def marks() -> T | None:
        return find(get_ident()) or slow()

    def slow() -> T | None:
        lane = lanes.get(name)
        if lane is None:
            return None
        made = known[get_ident()] = make(lane)
        return made

    return marks


def _detail(text: str) -> tuple[str, Callable[[tuple[Any, ...], dict[str, Any]], int]]:
    name, _, path = text.partition("=")
    length = path.endswith("#")
    first, *attributes = path.rstrip("#").split(".")

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        try:
            value = args[int(first)] if first.isdigit() else kwargs[first]
            for attribute in attributes:
                value = getattr(value, attribute)
            return len(value) if length else int(value)
        except Exception:  # another version of the engine: a missing detail is not worth a step
            return -1

    return name, read


class Installer:
    """Applies rows now or when their module is imported, and keeps the account.

    `missing` maps a target to why it is not wrapped; `waiting` names modules not imported yet.
    """

    def __init__(self, lanes: Lanes, *, mark: str = MARK) -> None:
        self._lanes = lanes
        self._mark = mark  # two installers may wrap the same function
        self._lock = threading.Lock()
        self._hook: _ImportHook | None = None
        self._undo: list[tuple[Any, str, Any]] = []
        self.wrapped: list[str] = []
        self.missing: dict[str, str] = {}
        self.waiting: dict[str, list[Row]] = {}

    def install(self, rows: Iterable[Row]) -> None:
        """Wrap what is imported, wait for the rest. Never raises; safe to call again."""
        for row in rows:
            try:
                module = sys.modules.get(row.module)
                if module is None or _half_imported(module):
                    with self._lock:
                        self.waiting.setdefault(row.module, []).append(row)
                else:
                    self._apply(row, module)
            except Exception as problem:  # the border to an engine: report, never raise
                self.missing[row.target] = f"{type(problem).__name__}: {problem}"
        if self.waiting and self._hook is None:
            self._hook = _ImportHook(self._imported, self.waiting)
            sys.meta_path.insert(0, self._hook)

    def uninstall(self) -> None:
        """Put everything back (tests, and paired measurements)."""
        if self._hook is not None and self._hook in sys.meta_path:
            sys.meta_path.remove(self._hook)
        self._hook = None
        self.waiting.clear()
        for owner, name, raw in reversed(self._undo):
            if raw is None:
                delattr(owner, name)
            else:
                setattr(owner, name, raw)
        self._undo.clear()
        self.wrapped.clear()

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            rows = self.waiting.pop(module.__name__, [])
        for row in rows:
            try:
                self._apply(row, module)
            except Exception as problem:
                self.missing[row.target] = f"{type(problem).__name__}: {problem}"

    def _apply(self, row: Row, module: ModuleType) -> None:
        *path, name = row.name.split(".")
        owner: Any = module
        for step in path:
            owner = getattr(owner, step, None)
            if owner is None:
                self.missing[row.target] = f"{module.__name__} has no {step}{_since(row)}"
                return
        raw = vars(owner).get(name)
        inherited = raw is None
        if inherited:
            raw = inspect.getattr_static(owner, name, None)
        if raw is None and row.forward:
            raw = _forwarder(name, row.forward)
        if raw is None:
            self.missing[row.target] = f"no {row.name} in {module.__name__}{_since(row)}"
            return
        kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
        function = raw.__func__ if kind else raw
        if getattr(function, self._mark, None) == row.target:
            return
        if not callable(function):
            self.missing[row.target] = f"{row.name} is no function"
            return
        if row.wrap is None and _suspends(function):
            self.missing[row.target] = "a coroutine or generator: a phase cannot span an await"
            return
        wrapper = (row.wrap or _generic(row))(function, self._lanes)
        setattr(wrapper, self._mark, row.target)
        setattr(owner, name, kind(wrapper) if kind else wrapper)
        self._undo.append((owner, name, None if inherited else raw))
        self.wrapped.append(row.target)
        self.missing.pop(row.target, None)


def _generic(row: Row) -> Wrap:
    return lambda function, lanes: wrap_phase(function, row, lanes)


def _since(row: Row) -> str:
    return f" (exists since {row.since})" if row.since else ""


def _suspends(function: Any) -> bool:
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
        or inspect.isgeneratorfunction(function)
    )


def _half_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _forwarder(name: str, inner: str) -> Callable[..., Any]:
    """A method that reaches `self.<inner>.<name>`, for classes that forward by __getattr__."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, inner), name)(*args, **kwargs)

    forward.__name__ = forward.__qualname__ = name
    return forward


class _ImportHook:
    """A meta-path finder that finds nothing itself: it lets a module load, then calls back."""

    def __init__(
        self, imported: Callable[[ModuleType], None], waiting: dict[str, list[Row]]
    ) -> None:
        self._imported = imported
        self._waiting = waiting
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting or getattr(self._busy, "name", None) == fullname:
            return None
        self._busy.name = fullname
        try:
            spec = self._rest(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._patch(spec.loader)
            return spec
        finally:
            self._busy.name = None

    def _rest(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                return spec
        return None

    def _patch(self, loader: Any) -> None:
        """Make this loader, which belongs to one module, call back after it ran the module."""
        run, imported = loader.exec_module, self._imported

        def exec_module(module: ModuleType) -> None:
            run(module)
            try:
                imported(module)
            except Exception:  # an import must never fail because of us
                pass

        try:
            loader.exec_module = exec_module
        except (
            AttributeError,
            TypeError,
        ):  # a loader written in C or with slots: rows stay waiting
            pass


class ThreadLanes:
    """The lanes of this process by name, each bound to the first thread that asks for it.

    A second thread that runs the same function gets None: a lane has one writer. `attach` is called
    once, at the first mark, in the process that marks (a forked child is another process).
    """

    def __init__(self, attach: Callable[[], Any]) -> None:
        self._attach = attach
        self._bound: dict[tuple[str, int], Any] = {}
        self._owner: dict[str, int] = {}
        self._here: dict[int, Any] = {}
        self._board: Any = None

    @property
    def board(self) -> Any:
        """The heartbeat board of this process (a no-op board when there is none)."""
        if self._board is None:
            self._board = self._attach()
        return self._board

    def forget(self) -> None:
        """Start again: this is a forked child, its threads and its role are new."""
        self._bound, self._owner, self._here, self._board = {}, {}, {}, None

    def get(self, name: str) -> Any:
        ident = get_ident()
        lane = self._bound.get((name, ident))
        if lane is not None:
            return lane
        return self._claim(name, ident)

    def release(self, name: str) -> None:
        """Close the lane, if this thread has it: the next thread that asks for the name gets it."""
        ident = get_ident()
        if self._owner.get(name) != ident:
            return
        lane = self._here.pop(ident, None)
        for known in (name, HERE):
            self._bound.pop((known, ident), None)
        del self._owner[name]
        if lane is not None:
            lane.close()

    def _claim(self, name: str, ident: int) -> Any:
        if name == HERE:
            return self._here.get(ident)
        if name in self._owner or ident in self._here:
            # Owned by another thread, or this thread already writes another lane.
            return self._here.get(ident) if self._owner.get(name) == ident else None
        try:
            lane = self.board.lane(name)
        except Exception:
            return None
        self._owner[name] = ident
        self._bound[name, ident] = self._bound[HERE, ident] = self._here[ident] = lane
        return lane
