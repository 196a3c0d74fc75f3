"""A spawner without processes: it records what was asked, and its children end on command."""

from __future__ import annotations

import os
from collections.abc import Callable

from stallwatch.process.spawn import Child, SpawnSpec


class FakeSpawner:
    """Gives out children whose pidfd becomes readable on `end(child)`, as a real one does.

    `refuse` is raised instead of starting, if set. Close with `close()`.
    """

    def __init__(self, *, first_pid: int = 1 << 22) -> None:
        # Above every pid_max: no fake pid can ever be somebody's.
        self._next = first_pid
        self._fds: list[int] = []
        self.specs: list[SpawnSpec] = []
        self.children: list[Child] = []
        self.refuse: Exception | None = None
        self.on_spawn: Callable[[Child], None] | None = None

    def __call__(self, spec: SpawnSpec) -> Child:
        self.specs.append(spec)
        if self.refuse is not None:
            raise self.refuse
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self._fds.append(write_end)
        self._next += 1
        child = Child(pid=self._next, start_ticks=1, pidfd=os.eventfd(0), output=read_end)
        self.children.append(child)
        if self.on_spawn is not None:
            self.on_spawn(child)
        return child

    def end(self, child: Child) -> None:
        """The child exits: its pidfd becomes readable, for ever."""
        os.eventfd_write(child.pidfd, 1)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
