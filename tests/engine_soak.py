"""Step after step with aborts among them, and what the engine holds at both ends. Used by the test and by the script."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from engine_rig import Rig

MIB = 1 << 20
EVERY = 100  # steps between two readings of the memory
ABORTED = 0.05
SEQS = 4


@dataclass(frozen=True)
class Held:
    """What the engine's processes hold, and what its pools have to give."""

    processes: int
    descriptors: int
    threads: int
    shared_files: int  # names below /dev/shm that are mapped or open
    free_slots: int
    free_pages: int

    @classmethod
    def by(cls, engine: Rig) -> Held:
        members = family()
        load = engine.scheduler.load
        return cls(
            len(members),
            sum(each.num_fds() for each in members),
            sum(each.num_threads() for each in members),
            len({name for each in members for name in shared(each.pid)}),
            load.free_slots,
            load.free_pages,
        )


@dataclass
class Soaked:
    """`memory`: (steps done, resident bytes of all processes), a reading every 100 steps."""

    before: Held
    after: Held
    requests: int
    aborted: int
    memory: list[tuple[int, int]] = field(default_factory=list)

    @property
    def slope(self) -> float:
        """MiB a thousand steps, by least squares."""
        count = len(self.memory)
        x_mean = sum(step for step, _ in self.memory) / count
        y_mean = sum(size for _, size in self.memory) / count
        above = sum((step - x_mean) * (size - y_mean) for step, size in self.memory)
        return above / sum((step - x_mean) ** 2 for step, _ in self.memory) * 1000 / MIB

    def differences(self) -> list[str]:
        """What is not the same at both ends, in words."""
        ends = [
            (each.name, getattr(self.before, each.name), getattr(self.after, each.name))
            for each in fields(Held)
        ]
        return [f"{name}: {first}, then {last}" for name, first, last in ends if first != last]


def family() -> list[psutil.Process]:
    """This process and its children: the tables' process among them."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def shared(pid: int) -> set[str]:
    """Files below /dev/shm that the process maps or has open."""
    found = {
        line.split(maxsplit=5)[-1]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    }
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:  # closed since it was listed: the listing's own
            continue
        if target.startswith("/dev/shm/"):
            found.add(target)
    return found


def soak(
    engine: Rig, *, warm_up: int, steps: int, told: Callable[[int, int], Any] = lambda *_: None
) -> Soaked:
    """Run `warm_up` steps, look, run `steps` more, look again. One request in twenty is aborted, at any age."""
    crowd = Crowd(engine)
    crowd.run(warm_up)
    gc.collect()
    before, asked, aborted = Held.by(engine), crowd.number, crowd.aborted
    memory: list[tuple[int, int]] = []

    def read(done: int) -> None:
        # What is free inside of this process would hide a leak until it is used up.
        ctypes.CDLL(None).malloc_trim(0)
        memory.append((done, sum(each.memory_info().rss for each in family())))
        told(*memory[-1])

    crowd.run(steps, read)
    gc.collect()
    return Soaked(before, Held.by(engine), crowd.number - asked, crowd.aborted - aborted, memory)


class Crowd:
    """Keeps four requests unfinished, of lengths and kinds of sampling that never repeat."""

    def __init__(self, engine: Rig) -> None:
        self.number = self.aborted = 0
        self._engine = engine
        self._chance = random.Random(29)
        self._doomed: dict[int, list[str]] = {}  # by the step behind which they are aborted
        self._done = 0

    def run(self, steps: int, read: Callable[[int], None] | None = None) -> None:
        """That many steps, and then what is unfinished to its end."""
        engine, begun = self._engine, self._done
        while self._done < begun + steps:
            while engine.scheduler.unfinished < SEQS:
                self._ask()
            if not engine.step():
                engine.retire()
                continue
            self._done += 1
            for name in self._doomed.pop(self._done, ()):
                self.aborted += engine.scheduler.end(name)
            if self._done % EVERY == 0:
                for kept in (engine.tokens, engine.logits, engine.finished, engine.shapes):
                    kept.clear()
                if read is not None:
                    read(self._done - begun)
        engine.drain()
        self._doomed.clear()

    def _ask(self) -> None:
        self.number += 1
        chance = self._chance
        prompt = [chance.randrange(256) for _ in range(chance.choice((1, 3, 17, 40)))]
        name = f"r{self.number}"
        self._engine.add(name, prompt, chance.randint(8, 40))
        if chance.random() < ABORTED:
            self._doomed.setdefault(self._done + chance.randint(1, 8), []).append(name)
