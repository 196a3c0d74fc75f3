"""What the plugin's marks cost per vLLM step: `python tests/bench/bench_plugin.py [PAIRS]`.

The real rows of the phase map wrap stubs of vLLM's functions that do nothing, called in the order of
one decode step of EngineCore, of one worker, and of the output thread, on a real board. Each pair
times the same steps plain and wrapped, in turns; the difference is the marks alone. (In a whole vLLM
the same difference drowns in the noise of its spinning processes.) Bar: 10 us per step.
"""

from __future__ import annotations

import os
import queue
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 400
BAR_US = 10.0


def stubs() -> dict[str, Any]:
    """Modules with vLLM's names whose functions do nothing."""

    class Scheduler:
        def schedule(self, *args): ...
        def update_from_output(self, *args): ...
        def get_num_unfinished_requests(self):
            return 1

    class FutureWrapper:
        def result(self, timeout=None): ...

    class MessageQueue:
        def enqueue(self, obj, timeout=None): ...

    class WorkerProc:
        def __init__(self):
            self.mq = MessageQueue()

        def _execute_worker_rpc(self, request):
            self.mq.enqueue(request)

    class EngineCoreProc:
        def __init__(self):
            self.scheduler = Scheduler()
            self.mq, self.future = MessageQueue(), FutureWrapper()
            self.output_queue = queue.SimpleQueue()

        def _process_input_queue(self): ...

        def _process_engine_step(self):
            self.scheduler.schedule(False)
            for _ in range(2):  # execute_model, sample_tokens
                self.mq.enqueue(())
                self.future.result()
            self.scheduler.update_from_output(None, None)
            return True

    found = {
        "vllm.v1.engine.core": {"EngineCoreProc": EngineCoreProc},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.executor.multiproc_executor": {
            "FutureWrapper": FutureWrapper,
            "WorkerProc": WorkerProc,
        },
        "vllm.distributed.device_communicators.shm_broadcast": {"MessageQueue": MessageQueue},
    }
    for name, content in found.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    return {"core": EngineCoreProc(), "worker": WorkerProc()}


def core_step(core: Any) -> None:
    core._process_input_queue()
    core._process_engine_step()


def worker_step(worker: Any) -> None:
    worker._execute_worker_rpc(("execute_model", (), {}, 0))
    worker._execute_worker_rpc(("sample_tokens", (), {}, 0))


def time_us(step: Callable[[Any], None], part: Any) -> float:
    began = time.thread_time_ns()  # processor time: a busy host must not be measured
    for _ in range(STEPS):
        step(part)
    return (time.thread_time_ns() - began) / STEPS / 1000


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval."""
    return statistics.mean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5


def measure(role: str, pairs: int) -> dict[str, tuple[float, float]]:
    """Cost in us per step of the marks of one process of that role."""
    import multiprocessing

    from stallwatch_engine import vllm_plugin
    from stallwatch_engine.phasemap import Installer
    from stallwatch_engine.vllm_plugin import vllm_map

    multiprocessing.current_process().name = "EngineCore" if role == "core" else "VllmWorker-0"
    part = stubs()[role]
    step = core_step if role == "core" else worker_step
    lanes = vllm_plugin.PluginLanes()
    lanes.serving = True
    rows = [*vllm_map.CORE_ROWS, *vllm_map.WORKER_ROWS]
    differences = []
    for number in range(pairs + 3):
        plain = time_us(step, part)
        installer = Installer(lanes)
        installer.install(rows)
        step(part)
        wrapped = time_us(step, part)
        installer.uninstall()
        if number >= 3:  # warm-up
            differences.append(wrapped - plain)
    assert lanes.board.attached, "no board: this would measure a no-op"
    return {role: interval(differences)}


def main() -> int:
    from stallwatch.board.create import BoardFolder

    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    board = BoardFolder.create(Path("/dev/shm"), engine="bench", incarnation=1)
    os.environ |= board.environment()
    worst = 0.0
    try:
        for role in ("core", "worker"):
            child = os.fork()  # each role its own process, as in vLLM
            if not child:
                mean, half = measure(role, pairs)[role]
                print(
                    f"{role}: {mean:.2f} +- {half:.2f} us per step ({pairs} pairs, 95 %)",
                    flush=True,
                )
                os._exit(0 if mean - half <= BAR_US else 1)
            worst = max(worst, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        board.remove()
    print(f"bar: {BAR_US:.0f} us per step and process: {'missed' if worst else 'met'}")
    return int(worst)


if __name__ == "__main__":
    raise SystemExit(main())
