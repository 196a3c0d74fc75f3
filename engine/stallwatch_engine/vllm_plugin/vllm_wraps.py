"""Wrappers that a plain phase cannot express: loops, queues, RPCs, leases. Used by vllm_map's rows.

Each takes (function, lanes) and returns the function that vLLM will call instead; none lets an error of
its own escape into the engine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from stallwatch_engine.phasemap import HERE, bound

WORKERS = "worker:*/main"
CORE = "core:*/main"
PAUSE_S = 3600.0

# Worker RPCs that belong to a start: minutes are normal there.
START_METHODS = frozenset(
    {
        "init_device",
        "load_model",
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
        "update_max_model_len",
        "get_kv_cache_spec",
        "reload_weights",
        "update_weights",
    }
)
# A worker's own count of model steps: RPCs that ran the model once.
STEP_METHODS = frozenset({"execute_model", "execute_dummy_batch"})


def busy_loop(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """EngineCore's loop: from here on the process serves; when it returns, it is going down."""

    @functools.wraps(function)
    def run_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _serve(lanes, "", lambda: function(self, *args, **kwargs))

    return run_busy_loop


def worker_loop(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """The same of a worker, which gets its work from EngineCore."""

    @functools.wraps(function)
    def worker_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _serve(lanes, CORE, lambda: function(self, *args, **kwargs))

    return worker_busy_loop


def _serve(lanes: Any, supplier: str, loop: Callable[[], Any]) -> Any:
    lane = lanes.get("main")
    if lane is None:
        return loop()
    lanes.serving = True
    lane.idle(on=supplier)
    lanes.board.ready()
    try:
        return loop()
    finally:
        lane.enter("shutdown", cls="stop")


def input_queue(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    marks = bound(lanes, "main", lambda lane: lane.idle_marker())

    @functools.wraps(function)
    def _process_input_queue(self: Any, *args: Any, **kwargs: Any) -> Any:
        idle = marks()
        if idle is not None:
            idle()
        return function(self, *args, **kwargs)

    return _process_input_queue


def engine_step(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """One turn of the engine. Only a turn that ran the model is progress.

    With remote KV the loop turns every millisecond and schedules nothing.
    """
    marks = bound(
        lanes, "main", lambda lane: (lane.marker("step"), lane.progress, lanes.board.pending)
    )

    @functools.wraps(function)
    def _process_engine_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = marks()
        if found is None:
            return function(self, *args, **kwargs)
        step, progress, pending = found
        step()
        executed = function(self, *args, **kwargs)
        if executed:
            progress(1)
        pending(self.scheduler.get_num_unfinished_requests())
        return executed

    return _process_engine_step


def client_request(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """Adding, aborting, utilities. A utility may run for minutes (sleep, load a LoRA)."""
    marks = bound(
        lanes, "main", lambda lane: (lane.pusher("handle"), lane.pusher("utility"), lane.pop)
    )

    @functools.wraps(function)
    def _handle_client_request(self: Any, request_type: Any, *args: Any, **kwargs: Any) -> Any:
        found = marks()
        if found is None:
            return function(self, request_type, *args, **kwargs)
        handle, utility, pop = found
        lanes.in_utility = getattr(request_type, "name", "") == "UTILITY"
        (utility if lanes.in_utility else handle)()
        try:
            return function(self, request_type, *args, **kwargs)
        finally:
            lanes.in_utility = False
            pop()
            lanes.board.pending(self.scheduler.get_num_unfinished_requests())

    return _handle_client_request


class _Methods:
    """The marks of a worker's RPCs by method name, bound at the first call of each."""

    def __init__(self, lane: Any) -> None:
        self._lane = lane
        self._marks: dict[str, Callable[[int], None]] = {}
        self.idle = lane.idle_marker(CORE)
        self.progress = lane.progress
        self.steps = 0

    def enter(self, method: Any) -> bool:
        """Say which RPC runs; True when it is a model step."""
        name = method if isinstance(method, str) else "rpc"
        mark = self._marks.get(name) or self._bind(name)
        step = name in STEP_METHODS
        self.steps += step
        mark(self.steps)
        return step

    def rpc_failed(self, error: str) -> None:
        """Idle, but the last RPC raised: the type of the error only, its text may hold a prompt."""
        self._lane.enter("rpc_failed", cls="idle", on=CORE, text=error)

    def _bind(self, name: str) -> Callable[[int], None]:
        cls = "start" if name in START_METHODS else "work"
        mark: Callable[[int], None] = self._lane.marker(name, "step", cls=cls)
        self._marks[name] = mark
        return mark


def worker_rpc(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """One RPC of a worker: its method is the phase; idle again when it is answered.

    vLLM swallows an exception on a rank that does not answer, and the others then wait for that rank
    in a collective. Such a rank is idle in the phase `rpc_failed`, and the step is no work done.
    """
    marks = bound(lanes, "main", _Methods)

    @functools.wraps(function)
    def _execute_worker_rpc(self: Any, rpc_request: Any, *args: Any, **kwargs: Any) -> Any:
        methods = marks()
        if methods is None:
            return function(self, rpc_request, *args, **kwargs)
        step = methods.enter(rpc_request[0])
        lanes.failed = ""
        try:
            return function(self, rpc_request, *args, **kwargs)
        finally:
            if lanes.failed:
                methods.rpc_failed(lanes.failed)
            else:
                if step:
                    methods.progress(1)
                methods.idle()

    return _execute_worker_rpc


def note_error(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """Remember that this step raised; WorkerProc logs it and may tell nobody."""

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as problem:
            lanes.failed = type(problem).__name__
            raise

    return step


def wait_worker(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """Entered before the blocking dequeue.

    While vLLM starts, and in a utility, minutes are normal: those waits carry names, and so limits,
    of their own.
    """
    marks = bound(
        lanes,
        "main",
        lambda lane: (
            lane.pusher("wait_worker", cls="wait", on=WORKERS),
            lane.pusher("wait_utility", cls="wait", on=WORKERS),
            lane.pusher("wait_worker_start", cls="start"),
            lane.pop,
        ),
    )

    @functools.wraps(function)
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = marks()
        if found is None:
            return function(self, *args, **kwargs)
        step, utility, start, pop = found
        (start if not lanes.serving else utility if lanes.in_utility else step)()
        try:
            return function(self, *args, **kwargs)
        finally:
            pop()

    return result


def uniproc_rpc(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """The worker inside EngineCore (one GPU, no worker process): the RPC runs on core/main."""

    @functools.wraps(function)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.get("main")
        if lane is None:
            return function(self, method, *args, **kwargs)
        name = method if isinstance(method, str) else "rpc"
        lane.push(name, cls="start" if name in START_METHODS else "work")
        try:
            return function(self, method, *args, **kwargs)
        finally:
            lane.pop()

    return collective_rpc


def _watch_queue(queue: Any, lane: Any, busy: str, *, on: str) -> None:
    """Mark the thread that drains `queue`: idle while it waits for an item, `busy` while it has one."""
    get, waits, has_item = queue.get, lane.idle_marker(on), lane.marker(busy)

    @functools.wraps(get)
    def marked(*args: Any, **kwargs: Any) -> Any:
        waits()
        item = get(*args, **kwargs)
        has_item()
        return item

    queue.get = marked


def core_output(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def process_output_sockets(self: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.get("output")
        if lane is not None:
            _watch_queue(self.output_queue, lane, "out_send", on=CORE)
        return function(self, *args, **kwargs)

    return process_output_sockets


def core_input(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """The thread that receives requests: idle in its poll; `preprocess` rows nest in it."""

    @functools.wraps(function)
    def process_input_sockets(self: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.get("input")
        if lane is not None:
            lane.idle()
        return function(self, *args, **kwargs)

    return process_input_sockets


def worker_output(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """The copy thread of asynchronous scheduling: a hung kernel shows here first."""

    @functools.wraps(function)
    def async_output_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.get("output")
        if lane is not None:
            _watch_queue(self.async_output_queue, lane, "out_copy", on=WORKERS)
        return function(self, *args, **kwargs)

    return async_output_busy_loop


def send(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """A write to a shared ring spins without a deadline when the reader does not read."""

    def bind(lane: Any) -> Any:
        name, reader = ("rpc_send", WORKERS) if lanes.role == "core" else ("send_result", CORE)
        return lane.pusher(name, cls="wait", on=reader), lane.pop

    marks = bound(lanes, HERE, bind)

    @functools.wraps(function)
    def enqueue(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = marks()
        if found is None:
            return function(self, *args, **kwargs)
        push, pop = found
        push()
        try:
            return function(self, *args, **kwargs)
        finally:
            pop()

    return enqueue


def pause_state(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """A paused scheduler (weight update, sleep) keeps requests and moves nothing: a lease says so.

    vLLM gives a pause no end; ours is STALLWATCH_PAUSE_S seconds, an hour unless set.
    """
    leases: list[Any] = []

    @functools.wraps(function)
    def set_pause_state(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, state, *args, **kwargs)
        paused = getattr(state, "name", "UNPAUSED") != "UNPAUSED"
        try:
            if paused and not leases and lanes.get("main") is not None:
                lease = lanes.board.pause("scheduler_paused", seconds=_pause_s(), owner="vllm")
                lease.__enter__()
                leases.append(lease)
            elif not paused and leases:
                leases.pop().__exit__(None, None, None)
        except Exception:  # a lease is never worth a pause that fails
            pass
        return result

    return set_pause_state


def _pause_s() -> float:
    try:
        seconds = float(os.environ.get("STALLWATCH_PAUSE_S", ""))
    except ValueError:
        return PAUSE_S
    return seconds if 0 < seconds < float("inf") else PAUSE_S


def _lease_the_wait(sentinel: Any, lanes: Any) -> None:
    wait = sentinel.resumed.wait
    given = float(getattr(sentinel, "engine_recovery_timeout_sec", None) or 0)
    seconds = given if 0 < given < float("inf") else PAUSE_S

    @functools.wraps(wait)
    def parked(timeout: float | None = None) -> Any:
        sentinel.resumed.wait = wait
        with lanes.board.pause("ft_parked", seconds=seconds, owner="vllm"):
            return wait(timeout)

    sentinel.resumed.wait = parked


def parked(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
    """Fault tolerance parks the loop until a controller answers: a pause with vLLM's own deadline."""

    @functools.wraps(function)
    def on_fault(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        try:
            _lease_the_wait(self, lanes)
        except Exception:  # another version: vLLM recovers without our lease
            pass
        return result

    return on_fault
