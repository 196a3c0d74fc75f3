"""Bounded waits for the output copies of vLLM's Model Runner V2.

`AsyncOutput` and `AsyncPoolingOutput` copy tokens to the host on a stream of their own, record a
CUDA event and later call `copy_event.synchronize()`, which has no deadline. On HCU (a ROCm-like
accelerator) that wait was seen never to return: the copy thread then sends neither a result nor a
failure, and the request hangs in silence. Here the event is the accelerator-generic `torch.Event`,
polled for at most VLLM_ENGINE_ITERATION_TIMEOUT_S; a TimeoutError that names the operation becomes
vLLM's own FAILURE response in `WorkerProc.enqueue_output`.

Why such an event can stay incomplete is not known; this bounds the damage.
The copy stream stays vLLM's, and a timed-out output is kept alive: the device may still write to it.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

from stallwatch_engine.phasemap import HERE, Row

TIMEOUT_VARIABLE = "VLLM_ENGINE_ITERATION_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 60.0  # vLLM's own default for the variable
SWITCH_VARIABLE = "STALLWATCH_BOUNDED_COPIES"  # "0" leaves vLLM's unbounded wait in place

# Decode steps copy out within milliseconds, so the first ones are polled densely: a query and a sleep
# cost 10 us, and every longer sleep is overshoot. Later the sleep is a share of the time already
# waited, up to a cap. Doubling from 0.1 ms to 10 ms was measured to add 2.5 ms to a wait of 2 to 8 ms.
DENSE_S = 0.010
DENSE_POLL_S = 0.0001
POLL_SHARE = 0.02
MAX_POLL_S = 0.001

_held: list[Any] = []  # outputs whose copy never completed; the engine is dead, so this stays short


def check_timeout(seconds: float) -> float:
    """The seconds, or ValueError when they are no positive finite number."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"{TIMEOUT_VARIABLE}={seconds} is no deadline: give a positive number of seconds"
        )
    return seconds


def wait_bounded(
    query: Callable[[], bool],
    *,
    timeout_s: float,
    operation: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when `query()` says done; TimeoutError naming the operation after `timeout_s`.

    A query that raises fails at once. An unusable timeout is refused before the first query.
    """
    check_timeout(timeout_s)
    if query():
        return
    began = clock()
    deadline = began + timeout_s
    while True:
        now = clock()
        if now >= deadline:
            if query():  # completed while this thread did not get to run
                return
            raise TimeoutError(f"{operation} did not complete within {timeout_s:g} s")
        waited = now - began
        pause = DENSE_POLL_S if waited < DENSE_S else min(waited * POLL_SHARE, MAX_POLL_S)
        sleep(min(pause, deadline - now))
        if query():
            return


class BoundedEvent:
    """Stands where vLLM has a `torch.cuda.Event(blocking=True)`: the same three methods, bounded."""

    __slots__ = ("_event", "_operation")

    def __init__(self, event: Any, operation: str) -> None:
        self._event = event
        self._operation = operation

    def record(self, stream: Any = None) -> None:
        if stream is None:
            self._event.record()
        else:
            self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait for the event; TimeoutError after the engine's iteration timeout."""
        wait_bounded(self._event.query, timeout_s=iteration_timeout(), operation=self._operation)


def iteration_timeout() -> float:
    """VLLM_ENGINE_ITERATION_TIMEOUT_S in seconds; ValueError when it is unusable."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    return check_timeout(seconds)


def make_event(torch: Any) -> Any:
    """The event of one output copy: whatever accelerator this torch runs on."""
    return torch.Event()


class _CudaView:
    """`torch.cuda` whose blocking events are bounded generic ones."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch.cuda, name)

    def Event(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  torch's name
        if args or kwargs != {"blocking": True}:
            return self._torch.cuda.Event(*args, **kwargs)  # timing events stay what they are
        return BoundedEvent(make_event(self._torch), "the copy of the model output to the host")


class TorchView:
    """`torch` as the module `async_utils` sees it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = _CudaView(torch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _bounded(function: Callable[..., Any], _lanes: Any) -> Callable[..., Any]:
    """Give the module of `function` the view of torch, and keep an output whose copy timed out.

    The constructor creates its event inline, so the name `torch` of its module is what changes. The
    phase is marked elsewhere: by the copy thread, or by AsyncOutputFuture without one.
    """
    names = function.__globals__
    if not isinstance(names.get("torch"), TorchView):
        names["torch"] = TorchView(names["torch"])

    @functools.wraps(function)
    def get_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except TimeoutError:
            _held.append(self)
            raise

    return get_output


def rows() -> tuple[Row, ...]:
    """The rows that bound both outputs; none when switched off."""
    if os.environ.get(SWITCH_VARIABLE, "1") == "0":
        return ()
    module = "vllm.v1.worker.gpu.async_utils"
    return tuple(
        Row(f"{module}:{name}.get_output", HERE, "out_copy", wrap=_bounded)
        for name in ("AsyncOutput", "AsyncPoolingOutput")
    )
