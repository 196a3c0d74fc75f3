"""From which reuse ratio on grouping pays, on this machine and for this type: measured, never assumed.

A row in a group costs its own arithmetic and its part of the loads: a + b / reuse. What a row costs alone
depends on the cache too, so both are measured on the same data, once where nothing and once where
everything is shared; their ratio is taken as linear in 1 / reuse, and the threshold is where it is 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from stallwatch_kernels.qsa import synthetic
from stallwatch_kernels.qsa.page4 import Call, Spec, prepare
from stallwatch_kernels.qsa.plan import GROUP, plan
from stallwatch_kernels.qsa.synthetic import Mix

_ROWS = 2 * GROUP
_REPEATS = 5


@dataclass(frozen=True)
class Calibration:
    """`threshold` for `page4.attend`, and the cost of a grouped row over a row alone behind it: where all
    is shared, and where nothing is.
    """

    threshold: float
    shared: float
    apart: float

    @property
    def reason(self) -> str:
        """The measurement in words, for a log line."""
        return (
            f"a grouped row costs {self.shared:.2f} of a row alone when all is shared, {self.apart:.2f} when "
            f"nothing is: grouping pays from reuse {self.threshold:.2f}"
        )


def crossing(shared: tuple[float, float], apart: tuple[float, float]) -> float:
    """The reuse ratio at which a grouped row costs what a row alone costs. `shared`, `apart` are (reuse,
    relative cost of a grouped row), the first with the greater reuse. 1: always pays; infinity: never.
    """
    (high, cheap), (low, dear) = shared, apart
    slope = (dear - cheap) / (1 / low - 1 / high)
    if slope <= 0:  # sharing gains nothing here: noise, or compute hides every load
        return 1.0 if cheap <= 1 else math.inf
    base = cheap - slope / high
    if base >= 1:
        return math.inf
    return max(1.0, slope / (1 - base))


def calibrate(spec: Spec, budget: int, *, repeats: int = _REPEATS) -> Calibration:
    """Measure `spec` at `budget` selected tokens a row, in this thread. Compiles what is not compiled."""
    found = []
    for share in (1.0, 0.0):
        call = _call(spec, budget, share)
        together, alone = _grouped(call), _ungrouped(call)
        ratio = _least(together, repeats) / _least(alone, repeats)
        found.append((plan(call.store, call.selection).reuse, ratio))
    shared, apart = found
    return Calibration(crossing(shared, apart), shared[1], apart[1])


def _call(spec: Spec, budget: int, share: float) -> Call:
    mix = Mix(_ROWS, context=8 * budget + 16, budget=budget, share=share)
    kv = synthetic.caches((spec.kv_heads, spec.size, spec.page), mix, spec.cache_dtype)
    q = synthetic.queries(spec.q_heads, spec.size, mix, spec.q_dtype)
    return prepare(q, kv, synthetic.rows(spec.page, mix))


def _grouped(call: Call) -> Callable[[], None]:
    def run() -> None:
        made = plan(call.store, call.selection)
        call.grouped(made, 0, made.groups)

    return run


def _ungrouped(call: Call) -> Callable[[], None]:
    return lambda: call.ungrouped(0, _ROWS)


def _least(work: Callable[[], None], repeats: int) -> float:
    """The thread's CPU time of the quickest run: a preempted moment does not count. Runs once before."""
    work()
    best = math.inf
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        best = min(best, time.thread_time() - begin)
    return best
