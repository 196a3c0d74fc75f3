"""A vLLM plugin that breaks vLLM on demand. For tests only; driven by tests/vllm/faults.py.

The folder of this file is put on PYTHONPATH. With STALLWATCH_TEST_FAULTS=FILE set, certain functions
look at FILE each time they run; a file that names this place makes the fault happen once, in the
process that renames the file away first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import threading
import time

from stallwatch_engine.phasemap import Installer, Row

FILE = "STALLWATCH_TEST_FAULTS"
ASYNC = "STALLWATCH_TEST_ASYNC_OUTPUT"  # "1": asynchronous scheduling in the worker


def register() -> None:
    """Wrap the places where a fault can happen."""
    path = os.environ.get(FILE)
    if not path:
        return
    rows = [_row(target, place, path) for target, place in PLACES]
    if os.environ.get(ASYNC) == "1":
        rows += [
            Row(
                "vllm.v1.worker.worker_base:WorkerWrapperBase.load_model",
                "",
                "x",
                forward="worker",
                wrap=_async_scheduling,
            ),
            Row(
                "vllm.v1.worker.worker_base:WorkerWrapperBase.sample_tokens",
                "",
                "x",
                forward="worker",
                wrap=lambda function, _: _async_output(function, path),
            ),
        ]
    Installer(None, mark="__stallwatch_fault__").install(rows)


# Inner functions of the phases, so that the order in which two plugins load does not matter.
PLACES = (
    ("vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", "worker/execute_model"),
    (
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        "worker/load_model",
    ),
    ("vllm.v1.core.kv_cache_manager:KVCacheManager.new_step_starts", "core/schedule"),
    ("vllm.v1.serial_utils:MsgpackEncoder.encode_into", "core/output"),
    ("vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "api/loop"),
)


def _row(target: str, place: str, path: str) -> Row:
    def wrap(function, _lanes):
        @functools.wraps(function)
        def hooked(*args, **kwargs):
            fault = _take(place, path)
            if fault is not None:
                FAULTS[fault]()
            return function(*args, **kwargs)

        return hooked

    return Row(target, "", "fault", wrap=wrap)


def _take(place: str, path: str) -> str | None:
    """The fault to do now, here, or None. Renaming the file is what makes it happen once."""
    try:
        with open(path, encoding="utf-8") as file:
            order = json.load(file)
    except (OSError, ValueError):
        return None
    if order["place"] != place or not _here(place, order.get("rank")):
        return None
    try:
        os.rename(path, f"{path}.taken")
    except OSError:
        return None
    with open(f"{path}.done", "w", encoding="utf-8") as file:
        json.dump({**order, "pid": os.getpid(), "at_ns": time.monotonic_ns()}, file)
    return order["fault"]


def _here(place: str, rank: int | None) -> bool:
    name = multiprocessing.current_process().name
    role = place.partition("/")[0]
    if role == "worker":
        return name == f"VllmWorker-{rank}" if rank is not None else name.startswith("VllmWorker-")
    if role == "core":
        right = threading.current_thread() is threading.main_thread()
        return name.startswith("EngineCore") and right == (place != "core/output")
    return not name.startswith(("EngineCore", "VllmWorker"))


def block_in_c() -> None:
    """Wait for ever in a C call that released the GIL, like a wait for a device."""
    _sem_wait(ctypes.CDLL(None))


def hold_gil() -> None:
    """Wait for ever in a C call that keeps the GIL: no Python of this process runs again."""
    _sem_wait(ctypes.PyDLL(None))


def _sem_wait(library) -> None:
    # A semaphore, not pause(): a handled signal (a stack dump) must not end the stall.
    semaphore = ctypes.create_string_buffer(64)
    library.sem_init(semaphore, 0, 0)
    while True:
        library.sem_wait(semaphore)


def spin() -> None:
    """Compute for ever in Python."""
    number = 0
    while True:
        number = (number * 1103515245 + 12345) % 2147483648


def raise_error() -> None:
    """Fail like a kernel that found its input wrong."""
    raise RuntimeError("injected: this rank fails")


def sleep_long() -> None:
    """Stand still for ever, interruptible (a deadlock on a Python lock looks like this)."""
    threading.Event().wait()


FAULTS = {
    "block_in_c": block_in_c,
    "hold_gil": hold_gil,
    "spin": spin,
    "raise": raise_error,
    "sleep": sleep_long,
}


class FakeEvent:
    """A copy event that completes at once, late, never, or raises when it is asked."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind
        self.late = time.monotonic() + 0.5

    def record(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        if self.kind == "event_raises":
            raise RuntimeError("injected: the device is lost")
        if self.kind == "event_never":
            return False
        return self.kind != "event_late" or time.monotonic() >= self.late


class FakeStream:
    """A stream of no device: the constructor of AsyncOutput only orders it behind another."""

    def wait_stream(self, other) -> None:
        pass


def _async_scheduling(function, _lanes):
    """CPU vLLM has no asynchronous output thread: let WorkerProc start one after the model is loaded."""

    @functools.wraps(function)
    def load_model(self, *args, **kwargs):
        result = function(self, *args, **kwargs)
        self.vllm_config.scheduler_config.async_scheduling = True
        return result

    return load_model


def _async_output(function, path: str):
    """Give each result of sample_tokens the way of a GPU: a real AsyncOutput with a fake event."""

    @functools.wraps(function)
    def sample_tokens(self, *args, **kwargs):
        output = function(self, *args, **kwargs)
        if output is None or not getattr(output, "sampled_token_ids", None):
            return output
        return _asynchronous(output, _take("worker/output", path))

    return sample_tokens


def _asynchronous(output, fault: str | None):
    import torch
    from vllm.v1.worker.gpu import async_utils
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from stallwatch_engine import hcu

    rows = output.sampled_token_ids
    width = max(1, *(len(row) for row in rows))
    padded = [[*row, *([0] * (width - len(row)))] for row in rows]
    fields = {"sampled_token_ids": torch.tensor(padded, dtype=torch.int64)}
    sampled = SamplerOutput(
        **{name: fields.get(name) for name in SamplerOutput.__dataclass_fields__}
    )
    make_event, hcu.make_event = hcu.make_event, lambda _torch: FakeEvent(fault)
    stream, async_utils.stream = async_utils.stream, lambda *_: contextlib.nullcontext()
    try:
        return async_utils.AsyncOutput(
            model_runner_output=output,
            sampler_output=sampled,
            num_sampled_tokens=torch.tensor([len(row) for row in rows]),
            main_stream=FakeStream(),
            copy_stream=FakeStream(),
            check_ep_fault=False,
            pending_aux_output=None,
        )
    finally:
        hcu.make_event, async_utils.stream = make_event, stream
