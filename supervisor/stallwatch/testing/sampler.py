"""A stack sampler without processes: scripted evidence, and a record of what was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stallwatch.evidence.model import Frame, ProcessEvidence, Rung, Target, ThreadStack
from stallwatch.evidence.sampler import Stacks

_PLAIN = ThreadStack(0, "MainThread", (Frame("execute_model", "model.py", 1),), owns_gil=False)


@dataclass
class FakeSampler:
    """Keeps StackSampler's promises (tests/process/test_evidence_sampler.py holds both to them).

    A pid in `scripted` gets that evidence, one in `gone` is gone, any other a plain stack.
    `during` (if set) is waited for inside `first`, so that a test can move lanes meanwhile.
    """

    scripted: Mapping[int, ProcessEvidence] = field(default_factory=dict)
    gone: Iterable[int] = ()
    later: Sequence[Stacks] = ()
    devices: Mapping[str, Any] = field(default_factory=dict)
    during: threading.Event | None = None
    calls: list[tuple[str, tuple[Target, ...]]] = field(default_factory=list)
    cancelled: bool = False

    def first(self, targets: Sequence[Target], *, deadline_s: float = 1.0) -> Stacks:
        self.calls.append(("first", tuple(targets)))
        if self.during is not None:
            self.during.wait(deadline_s)
        return {target.pid: self._one(target) for target in targets}

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
        self.calls.append(("more", tuple(targets)))
        if self.later:
            return list(self.later)
        seen = [t for t in targets if t.pid in first and first[t.pid].rung is Rung.PYSPY]
        plain = [{t.pid: self._one(t) for t in targets} for _ in range(samples)]
        deep = {t.pid: replace(self._one(t), rung=Rung.NATIVE) for t in seen}
        return ([deep] if native and seen else []) + plain

    def gpu(self, *, deadline_s: float = 5.0) -> dict[str, Any]:
        return dict(self.devices) or {"available": False, "why": "no device tool is installed"}

    def cancel(self) -> None:
        self.cancelled = True

    def _one(self, target: Target) -> ProcessEvidence:
        if target.pid in self.gone:
            return ProcessEvidence(target, Rung.NONE, problems=("the process is gone",))
        if target.pid in self.scripted:
            return replace(self.scripted[target.pid], target=target)
        thread = replace(_PLAIN, tid=target.pid)
        return ProcessEvidence(target, Rung.PYSPY, (thread,), facts={"state": "S", "wchan": ""})
