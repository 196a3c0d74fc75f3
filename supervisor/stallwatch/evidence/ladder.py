"""The ladder: for each process the best evidence that can be had now, all processes at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stallwatch import procfs
from stallwatch.clock import Clock, seconds
from stallwatch.evidence import faulthandler, gpu, procfacts
from stallwatch.evidence.clean import clean
from stallwatch.evidence.model import ProcessEvidence, Rung, Target, ThreadStack
from stallwatch.evidence.pyspy import PySpy
from stallwatch.evidence.sampler import Stacks
from stallwatch.evidence.tool import ToolRegistry

MAX_TARGETS = 256
_WORKERS = 16
_SIGNAL_S = 0.35  # kept back for faulthandler when the board declares a signal
_REAP_S = 0.1  # kept back so that a tool killed at its deadline is reaped within the cap
_NATIVE_S = 10.0
_LATE_S = 4.0  # the one second look at a process whose first stack did not come in time
_BUSY = "an earlier collection for this engine is still running"
_STUCK = "an earlier look at this process never came back: it is left alone"

_Look = Callable[[Target, "_Slot", float], None]


class _Slot:
    """One process's evidence while it is being collected: the latest word wins."""

    def __init__(self, target: Target, began_ns: int) -> None:
        self.began_ns = began_ns
        self.value = ProcessEvidence(
            target, Rung.NONE, problems=("its turn did not come in time",), taken_ns=began_ns
        )


class Ladder:
    """Evidence for one engine. `run_folder` is the incarnation's board folder: replace it between
    incarnations. Safe from any thread; a second collection at the same time is refused, in words.
    Only a new case's `first` ends the samples of a case that is over, and takes its turn.
    """

    def __init__(
        self,
        clock: Clock,
        registry: ToolRegistry,
        proc: Path = procfs.PROC,
        run_folder: Path | None = None,
        *,
        pyspy: PySpy | None = None,
    ) -> None:
        self._clock = clock
        self._registry = registry
        self._proc = proc
        self.run_folder = run_folder
        self.pyspy = pyspy or PySpy(registry, proc=proc)
        self._busy = threading.Lock()
        self._sampling = False  # `more` is what holds the lock
        self._cancelled = threading.Event()
        self._stuck: dict[tuple[int, int], threading.Thread] = {}
        self._late: set[int] = set()  # pids whose py-spy ran out of time in the last first()

    def first(self, targets: Sequence[Target], *, deadline_s: float = 1.0) -> Stacks:
        """Non-blocking stacks of all targets within `deadline_s` in total; /proc facts always."""
        until = time.monotonic() + deadline_s
        with self._alone(deadline_s / 2) as alone:
            if not alone:
                return self._refused(targets)
            self._late = set()
            return self._collect(targets, self._look, until - time.monotonic())

    def more(
        self,
        targets: Sequence[Target],
        first: Mapping[int, ProcessEvidence],
        *,
        deadline_s: float = 15.0,
        native: bool = True,
        samples: int = 2,
        gap_s: float = 1.0,
    ) -> list[Stacks]:
        """Native frames of targets in a safe state, then `samples` further looks, oldest first.

        Before them, once, the stacks of processes for which `first` ran out of time. `gap_s` is
        measured between the samples; the native look fits into the first gap. Ends early when
        cancelled, with what there is.
        """
        with self._alone() as alone:
            if not alone:
                return []
            began = time.monotonic()
            until = began + deadline_s
            room = deadline_s - samples * gap_s - 1.0
            self._cancelled.clear()
            self._sampling = True
            seen = [t for t in targets if t.pid in first and first[t.pid].rung is Rung.PYSPY]
            sets = self._once_more(targets, room)
            if native and seen:
                most = min(_NATIVE_S, room - (time.monotonic() - began))
                sets.append(self._collect(seen, self._look_native, max(0.5, most)))
            # What refused py-spy once is not asked again, and is not signalled twice.
            fresh = {t.pid for t in targets if t.pid not in first}
            known = {pid for s in sets for pid, e in s.items() if e.rung is Rung.PYSPY}
            again = self._again({t.pid for t in seen} | fresh | known)
            return sets + self._samples(targets, again, (began, until), (samples, gap_s))

    def _once_more(self, targets: Sequence[Target], room: float) -> list[Stacks]:
        """Once, with more time: a loaded host made py-spy late (up to 2.6 s measured), not ill."""
        late = [t for t in targets if t.pid in self._late]
        self._late = set()
        if not late or room < 2 * _REAP_S:
            return []
        return [self._collect(late, self._again({t.pid for t in late}), min(_LATE_S, room))]

    def _samples(
        self,
        targets: Sequence[Target],
        look: _Look,
        span: tuple[float, float],
        plan: tuple[int, float],
    ) -> list[Stacks]:
        """`plan` = (how many, how far apart), within `span` = (the first look, the end)."""
        last, until = span
        count, gap_s = plan
        sets: list[Stacks] = []
        for _ in range(count):
            due = min(last + gap_s, until) - time.monotonic()
            if self._cancelled.wait(max(0.0, due)) or until - time.monotonic() < 2 * _REAP_S:
                break
            last = time.monotonic()
            sets.append(self._collect(targets, look, min(1.0, until - last)))
        return sets

    def gpu(self, *, deadline_s: float = 5.0) -> dict[str, Any]:
        """Device facts by bounded tools; may run beside `more`."""
        return gpu.facts(self._registry, deadline_s=deadline_s)

    def cancel(self) -> None:
        """End the gaps of a running `more`: the supervisor is asked to stop."""
        self._cancelled.set()

    @contextmanager
    def _alone(self, patience_s: float = 0.0) -> Iterator[bool]:
        alone = self._busy.acquire(blocking=False)
        if not alone and patience_s and self._sampling:
            self.cancel()
            alone = self._busy.acquire(timeout=patience_s)
        try:
            yield alone
        finally:
            if alone:
                self._sampling = False
                self._busy.release()

    def _refused(self, targets: Sequence[Target]) -> Stacks:
        now = self._clock.monotonic_ns()
        return {
            t.pid: ProcessEvidence(t, Rung.NONE, problems=(_BUSY,), taken_ns=now) for t in targets
        }

    def _collect(self, targets: Sequence[Target], look: _Look, deadline_s: float) -> Stacks:
        """`look` at all targets in parallel; what is not back in time is taken as far as it got."""
        began = time.monotonic()
        until = began + deadline_s
        slots = {t.pid: _Slot(t, self._clock.monotonic_ns()) for t in targets[:MAX_TARGETS]}
        todo: queue.SimpleQueue[Target] = queue.SimpleQueue()
        for target in targets[:MAX_TARGETS]:
            if self._still_stuck(target, until):
                self._say(slots[target.pid], problems=(_STUCK,))
            else:
                todo.put(target)
        crew = [
            _Worker(todo, slots, look, until) for _ in range(min(_WORKERS, max(1, todo.qsize())))
        ]
        for worker in crew:
            worker.start()
        for worker in crew:
            worker.join(max(0.0, until - time.monotonic()))
            if worker.is_alive() and (held := worker.target) is not None:
                self._stuck[held.pid, held.start_ticks] = worker
        return {pid: slot.value for pid, slot in slots.items()}

    def _still_stuck(self, target: Target, until: float) -> bool:
        key = (target.pid, target.start_ticks)
        if (thread := self._stuck.get(key)) is None:
            return False
        # It may only be reaping its tool: give it a part of our time, never all of it.
        thread.join(max(0.0, (until - time.monotonic()) / 2))
        if not thread.is_alive():
            del self._stuck[key]
        return thread.is_alive()

    def _look(self, target: Target, slot: _Slot, until: float) -> None:
        """py-spy, else faulthandler, else /proc. Every rung that is reached is published at once."""
        if not self._facts(target, slot):
            return
        signalled = _SIGNAL_S if target.dump_signal and target.dump_path else 0.0
        left = until - time.monotonic() - _REAP_S - signalled
        if self._stacks(target, slot, max(0.05, left)):
            self._deep(target, slot)
            return
        left = until - time.monotonic() - 0.02
        asked = faulthandler.dump(
            target, self.run_folder, deadline_s=max(0.0, left), proc=self._proc
        )
        rung = Rung.FAULTHANDLER if asked.threads else Rung.PROC
        self._say(slot, rung=rung, threads=asked.threads, problems=_words(asked.problem))
        self._deep(target, slot)

    def _again(self, reachable: AbstractSet[int]) -> _Look:
        def look(target: Target, slot: _Slot, until: float) -> None:
            if self._facts(target, slot) and target.pid in reachable:
                self._stacks(target, slot, max(0.05, until - time.monotonic() - _REAP_S))

        return look

    def _look_native(self, target: Target, slot: _Slot, until: float) -> None:
        if not self._facts(target, slot):
            return
        unsafe = procfacts.unsafe_to_stop(target, self._proc)
        if "state D" in unsafe:  # a page fault is D too, for a moment
            time.sleep(0.02)
            unsafe = procfacts.unsafe_to_stop(target, self._proc)
        if unsafe:
            self._say(slot, problems=(f"native frames were not taken: {unsafe}",))
            return
        left = max(0.05, until - time.monotonic() - 3 * _REAP_S)
        dump = self.pyspy.dump(target, deadline_s=left, native=True)
        rung = Rung.NATIVE if dump.threads else Rung.PROC
        self._say(slot, rung=rung, threads=dump.threads, problems=_words(dump.problem, dump.note))

    def _stacks(self, target: Target, slot: _Slot, deadline_s: float) -> bool:
        dump = self.pyspy.dump(target, deadline_s=deadline_s)
        if dump.late:
            self._late.add(target.pid)
        rung = Rung.PYSPY if dump.threads else Rung.PROC
        self._say(slot, rung=rung, threads=dump.threads, problems=_words(dump.problem))
        return bool(dump.threads)

    def _facts(self, target: Target, slot: _Slot) -> bool:
        """Publish the /proc facts; False: there is nothing more to be had."""
        found = procfacts.quick(target, self._proc)
        if not found.alive:
            slot.value = ProcessEvidence(
                target, Rung.NONE, problems=found.problems, taken_ns=slot.began_ns
            )
            return False
        slot.value = ProcessEvidence(
            target,
            Rung.PROC,
            facts=found.facts,
            thread_facts=found.threads,
            problems=found.problems,
            taken_ns=slot.began_ns,
        )
        if found.state in "ZX":
            self._say(slot, problems=("the process is a zombie: it has no stack any more",))
            return False
        return True

    def _deep(self, target: Target, slot: _Slot) -> None:
        more = procfacts.deep(target, self._proc)
        slot.value = replace(slot.value, facts={**slot.value.facts, **more})

    def _say(
        self,
        slot: _Slot,
        *,
        rung: Rung | None = None,
        threads: tuple[ThreadStack, ...] = (),
        problems: tuple[str, ...] = (),
    ) -> None:
        took = seconds(self._clock.monotonic_ns() - slot.began_ns)
        slot.value = replace(
            slot.value,
            rung=rung or slot.value.rung,
            threads=threads or slot.value.threads,
            problems=slot.value.problems + problems,
            took_s=round(took, 4),
        )


class _Worker(threading.Thread):
    """Takes targets off the queue. A daemon thread: one lost in /proc must not keep us alive."""

    def __init__(
        self, todo: queue.SimpleQueue[Target], slots: dict[int, _Slot], look: _Look, until: float
    ) -> None:
        super().__init__(name="stallwatch-evidence", daemon=True)
        self._todo, self._slots, self._look, self._until = todo, slots, look, until
        self.target: Target | None = None

    def run(self) -> None:
        while time.monotonic() < self._until:
            try:
                target = self._todo.get_nowait()
            except queue.Empty:
                break
            self.target, slot = target, self._slots[target.pid]
            try:
                self._look(target, slot, self._until)
            except Exception as error:  # one process's surprise must not cost the others' evidence
                problem = f"evidence failed: {type(error).__name__}: {clean(str(error), 120)}"
                slot.value = replace(slot.value, problems=(*slot.value.problems, problem))
        self.target = None


def _words(*problems: str) -> tuple[str, ...]:
    return tuple(filter(None, problems))
