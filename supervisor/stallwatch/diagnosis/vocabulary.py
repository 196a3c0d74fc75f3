"""The words diagnosis understands, as data: which roles, phases, files and kernel waits mean what.

Nothing else in this package knows an engine. A user's engine extends the tables:
`DEFAULT.extended(device_phases={"code2wav"})`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Sets of lower-case names. Phases and roles compare without regard to case."""

    # Processes whose work lanes may wait for an accelerator in any phase not named host-only.
    device_roles: frozenset[str] = frozenset({"worker", "offload"})
    # Phases that touch an accelerator in whatever process they run (uni executor: the core).
    device_phases: frozenset[str] = frozenset(
        {
            "execute_model",
            "sample_tokens",
            "execute_dummy_batch",
            "take_draft_token_ids",
            "exec",
            "forward",
            "prefill",
            "decode",
            "sample",
            "synchronize",
            "input_prep_sync",
            "determine_available_memory",
            "initialize_from_config",
            "compile_or_warm_up_model",
            "init_device",
            "load_model",
            "capture_model",
            "wake_up",
            "sleep",
            "add_lora",
            "capture",
            "profile_run",
            "kernel_warmup",
            "warmup_kernels",
            "load_weights",
            "input_sync",
            "bookkeeping_sync",
            "kv_load",
            "kv_save",
        }
    )
    # Waiting for a result to leave the device: on a GPU a hung kernel shows here first.
    copy_phases: frozenset[str] = frozenset(
        {"out_copy", "output_copy", "copy_output", "get_output", "copy", "d2h"}
    )
    # Handing a result or a call to another process.
    send_phases: frozenset[str] = frozenset(
        {"out_send", "output_send", "send_output", "send", "send_outputs", "send_result"}
    )
    # Phases that wait for other lanes without saying so on the board: (phase, target).
    implicit_waits: tuple[tuple[str, str], ...] = (("wait_worker_start", "worker:*/main"),)
    # Never a device wait, whoever runs them.
    host_phases: frozenset[str] = frozenset(
        {
            "schedule",
            "update",
            "update_from_output",
            "grammar",
            "get_grammar_bitmask",
            "handle",
            "rpc_send",
            "send_result",
            "wait_worker",
            "wait_worker_start",
            "step",
            "preprocess",
            "shutdown",
            "loop",
            "process_outputs",
            "out_send",
            "output_send",
            "send_output",
            "send",
            "send_outputs",
            "dp_sync",
            "ft_parked",
            "tokenize",
            "detokenize",
        }
    )
    # Ranks of these roles take every step together: the odd one out is the culprit.
    gang_roles: frozenset[str] = frozenset({"worker"})
    frontend_roles: frozenset[str] = frozenset({"api", "frontend"})
    frontend_lanes: frozenset[str] = frozenset({"loop"})
    # Standard library files whose frames mean "waits by design", and for what. py-spy shortens a path to
    # its package, so these come as "queue.py" or as ".../lib/python3.11/queue.py".
    waiting_stdlib: tuple[tuple[str, str], ...] = (
        ("threading.py", "a threading lock or condition"),
        ("queue.py", "a queue"),
        ("selectors.py", "a selector"),
        ("socket.py", "a socket"),
        ("ssl.py", "a TLS socket"),
        ("subprocess.py", "a child process"),
        ("multiprocessing/connection.py", "a multiprocessing connection"),
        ("multiprocessing/queues.py", "a multiprocessing queue"),
        ("multiprocessing/synchronize.py", "a multiprocessing lock"),
        ("multiprocessing/popen_fork.py", "a child process"),
        ("multiprocessing/managers.py", "a manager process"),
        ("concurrent/futures/_base.py", "a future"),
        ("concurrent/futures/thread.py", "a thread pool's queue"),
        ("asyncio/base_events.py", "an event loop"),
        ("asyncio/runners.py", "an event loop"),
    )
    # The same for packages, by the end of the path.
    waiting_packages: tuple[tuple[str, str], ...] = (
        ("/uvloop/__init__.py", "an event loop"),
        ("/zmq/sugar/socket.py", "a message socket"),
        ("/zmq/sugar/poll.py", "a message socket"),
        ("/zmq/_future.py", "a message socket"),
        ("/filelock/_api.py", "a lock file"),
        ("/device_communicators/shm_broadcast.py", "a shared-memory queue"),
    )
    # Frames that only carry a call: named never, looked through always.
    wrapper_files: tuple[str, ...] = (
        "/stallwatch_engine/vllm_plugin/",
        "/stallwatch_engine/phasemap.py",
        "/stallwatch_engine/hcu.py",
        "/stallwatch_engine/streams/",  # the embedded engine's bounded waits: their caller says for what
        "/stallwatch/heartbeat/",
        "/functools.py",
        "/contextlib.py",
        "/torch/utils/_contextlib.py",
    )
    # Our own bounded waits for device events: their poll is a device wait though it sleeps in Python.
    device_poll_files: tuple[str, ...] = (
        "/stallwatch_engine/vllm_plugin/hcu.py",
        "/stallwatch_engine/hcu.py",
    )
    # Where an innermost Python frame is itself a call for the device: parts of the path ...
    device_call_files: tuple[str, ...] = ("/torch/", "/torch_npu/", "/triton/runtime/", "/cupy/")
    # ... but not these: compilers, loaders and pools, whose waits are locks and children.
    device_call_not: tuple[str, ...] = (
        "/torch/_dynamo/",
        "/torch/_inductor/",
        "/torch/_functorch/",
        "/torch/fx/",
        "/torch/hub.py",
        "/torch/multiprocessing/",
        "/torch/package/",
        "/torch/utils/",
    )
    # ... or names (last part) that engines give to their waits for a device.
    device_call_names: frozenset[str] = frozenset(
        {
            "synchronize",
            "synchronize_device",
            "device_synchronize",
            "stream_synchronize",
            "event_synchronize",
            "wait_event",
            "wait_stream",
            "item",
            "tolist",
            "cpu",
        }
    )
    # C functions that only a driver's user calls, whatever library they are in.
    device_symbols: tuple[str, ...] = ("ioctl", "GI_ioctl", "GI___ioctl")
    # Libraries and sources of the interpreter and the C library: a lock of Python's is made of these.
    interpreter_files: tuple[str, ...] = (
        "/libc.so",
        "/libc-",
        "/libc.musl",
        "/ld-linux",
        "/ld-musl",
        "/libpthread",
        "/libpython",
        "/bin/python",
        "/lib-dynload/",
        "/nptl/",
        "/sysdeps/",
        "[vdso]",
        "linux-vdso",
    )
    # Function names (last part) of collective operations: who sits in one waits for its peers.
    collective_names: frozenset[str] = frozenset(
        {
            "all_reduce",
            "_all_reduce_out_place",
            "all_gather",
            "all_gather_into_tensor",
            "all_gatherv",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "all_to_all",
            "all_to_all_single",
            "broadcast",
            "broadcast_object",
            "broadcast_tensor_dict",
            "gather",
            "scatter",
            "send_tensor_dict",
            "recv_tensor_dict",
            "shm_allreduce",
            "barrier",
            "monitored_barrier",
            "tensor_model_parallel_all_reduce",
            "tensor_model_parallel_all_gather",
            "tensor_model_parallel_gather",
        }
    )
    # Native symbols (py-spy --native) that mean the same.
    waiting_symbols: tuple[tuple[str, str], ...] = (
        ("PyThread_acquire_lock", "a lock"),
        ("lock_PyThread_acquire_lock", "a lock"),
        ("rlock_acquire", "a lock"),
        ("_PyMutex_Lock", "a lock"),
        ("_PySemaphore_", "a lock"),
        ("_PyParkingLot_Park", "a lock"),
        ("semlock_acquire", "a multiprocessing lock"),
        ("time_sleep", "time.sleep"),
        ("pysleep", "time.sleep"),
        ("take_gil", "the GIL"),
        ("os_waitpid", "a child process"),
        ("sock_recv", "a socket"),
        ("sock_accept", "a socket"),
        ("select_epoll_poll", "a poll"),
        ("select_poll_poll", "a poll"),
        ("select_select", "a poll"),
        ("_queue_SimpleQueue_get", "a queue"),
    )
    # Kernel wait channels by prefix: what a thread asleep there is certainly not doing is a device wait.
    host_wchans: tuple[tuple[str, str], ...] = (
        ("hrtimer_nanosleep", "a timed sleep"),
        ("do_nanosleep", "a timed sleep"),
        ("common_nsleep", "a timed sleep"),
        ("anon_pipe_read", "a pipe with nothing in it"),
        ("pipe_read", "a pipe with nothing in it"),
        ("pipe_wait_readable", "a pipe with nothing in it"),
        ("anon_pipe_write", "a full pipe"),
        ("pipe_write", "a full pipe"),
        ("pipe_wait_writable", "a full pipe"),
        ("do_wait", "a child process"),
        ("kernel_wait", "a child process"),
        ("kernel_clone", "a child that was started with vfork"),
        ("wait_for_vfork", "a child that was started with vfork"),
        ("unix_stream_", "a local socket"),
        ("sk_wait_data", "a socket"),
        ("inet_csk_accept", "a socket"),
        ("__skb_wait_for_more", "a socket"),
        ("skb_wait_for_more", "a socket"),
        ("wait_for_unix", "a local socket"),
        ("locks_lock_inode", "a lock file"),
        ("flock_lock_inode", "a lock file"),
        ("__flock", "a lock file"),
        ("folio_wait", "storage"),
        ("io_schedule", "storage"),
        ("request_wait_answer", "a file system in user space"),
        ("nfs", "network storage"),
        ("rpc_wait", "network storage"),
        ("n_tty_read", "a terminal"),
        ("do_epoll_wait", "an epoll set"),
        ("ep_poll", "an epoll set"),
        ("do_sigtimedwait", "a signal"),
        ("signal_pending", "a signal"),
    )
    # A send that the other side does not take.
    full_socket_wchans: tuple[str, ...] = (
        "sock_alloc_send",
        "sock_wait_for_wmem",
        "sk_stream_wait_memory",
        "unix_wait_for_peer",
    )
    timed_wchans: tuple[str, ...] = ("hrtimer_nanosleep", "do_nanosleep", "common_nsleep")
    lock_wchans: tuple[str, ...] = ("futex_", "do_futex")
    empty_pipe_wchans: tuple[str, ...] = ("anon_pipe_read", "pipe_read", "pipe_wait_readable")
    # Wait targets that are no lane of this engine.
    remote_prefixes: tuple[str, ...] = (
        "remote:",
        "tcp://",
        "http://",
        "https://",
        "grpc://",
        "ucx://",
        "rdma://",
        "nixl://",
    )
    # Integer details that count messages of one channel: at its writer, at its reader.
    sent_details: frozenset[str] = frozenset({"sent", "posted", "written", "enqueued"})
    seen_details: frozenset[str] = frozenset({"seen", "received", "read", "dequeued"})
    # Whose loop it is that turns and schedules nothing.
    scheduler_roles: frozenset[str] = frozenset({"core", "scheduler", "engine"})
    scheduler_lanes: frozenset[str] = frozenset({"scheduler", "schedule"})
    # Frames that poll for a lock file: files by their end, functions by a part of the name.
    lock_files: tuple[str, ...] = ("/file_baton.py", "/filelock/_api.py", "/filelock/_soft.py")
    lock_names: tuple[str, ...] = ("lock", "baton")
    # Frames of a child that was forked and runs on with its parent's memory.
    fork_files: tuple[str, ...] = ("multiprocessing/popen_fork.py",)
    # Functions, Python's and C's, that load a kernel into a device at its first use.
    kernel_loaders: tuple[str, ...] = (
        "load_binary",
        "_init_handles",
        "load_module",
        "load_kernel",
        "module_load",
        "cuModuleLoad",
        "cuLibraryLoad",
        "cuModuleGetFunction",
        "cuLibraryGetKernel",
        "hipModuleLoad",
        "hipModuleGetFunction",
    )
    full_pipe_wchans: tuple[str, ...] = ("anon_pipe_write", "pipe_write", "pipe_wait_writable")
    # Prefixes that only a driver sleeps under, or waits whose meaning the C library hides.
    driver_wchans: tuple[str, ...] = (
        "nv",
        "uvm",
        "amdgpu",
        "kfd",
        "kcl_",
        "drm",
        "dma_fence",
        "ioctl",
        "davinci",
        "devdrv",
    )

    def extended(self, **more: Iterable[str]) -> Vocabulary:
        """A copy whose named sets also hold these words. Unknown names raise TypeError."""
        known = {f.name for f in fields(self)}
        changes: dict[str, frozenset[str] | tuple[str, ...]] = {}
        for name, words in more.items():
            if name not in known:
                raise TypeError(f"no table called {name}")
            current = getattr(self, name)
            changes[name] = (
                current | {w.lower() for w in words}
                if isinstance(current, frozenset)
                else (*current, *words)
            )
        return replace(self, **changes)  # type: ignore[arg-type]  # keyed by field name above

    def touches_device(self, role: str, phase: str) -> bool:
        """May a lane of this role in this phase be waiting for an accelerator?"""
        phase = phase.lower()
        if phase in self.host_phases:
            return False
        return (
            role.lower() in self.device_roles
            or phase in self.device_phases
            or phase in self.copy_phases
        )


DEFAULT = Vocabulary()


def prefixed(text: str, table: Iterable[tuple[str, str]]) -> str:
    """The meaning of the first prefix that fits, or ''."""
    return next((meaning for prefix, meaning in table if text.startswith(prefix)), "")
