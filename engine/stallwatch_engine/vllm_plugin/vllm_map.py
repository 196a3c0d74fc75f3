"""The phases of vLLM 0.25 to 0.33: which function is which phase on which lane.

Names were compared over nine releases; line numbers move, names do not. Rows for newer names say
`since`. Limits are not given here: they belong to the supervisor's configuration, by phase name.

Lanes: api/loop; core/main, core/input, core/output; worker/main, worker/output.
"""

from __future__ import annotations

from typing import Any

from stallwatch_engine.phasemap import HERE, Row
from stallwatch_engine.vllm_plugin.vllm_wraps import (
    CORE,
    WORKERS,
    busy_loop,
    client_request,
    core_input,
    core_output,
    engine_step,
    input_queue,
    note_error,
    parked,
    pause_state,
    send,
    uniproc_rpc,
    wait_worker,
    worker_loop,
    worker_output,
    worker_rpc,
)

_CORE_PROC = "vllm.v1.engine.core:EngineCoreProc"
_DP_PROC = "vllm.v1.engine.core:DPEngineCoreProc"
_WORKER_PROC = "vllm.v1.executor.multiproc_executor:WorkerProc"
_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


def _start(target: str, phase: str, **more: Any) -> Row:
    return Row(target, HERE, phase, "start", **more)


CORE_ROWS = (
    Row(f"{_CORE_PROC}.run_busy_loop", "main", "serve", wrap=busy_loop),
    Row(f"{_DP_PROC}.run_busy_loop", "main", "serve", wrap=busy_loop),
    Row(f"{_CORE_PROC}._process_input_queue", "main", "idle", "idle", wrap=input_queue),
    Row(f"{_CORE_PROC}._handle_client_request", "main", "handle", wrap=client_request),
    Row(f"{_CORE_PROC}._process_engine_step", "main", "step", wrap=engine_step),
    Row(f"{_CORE_PROC}.process_output_sockets", "output", "out_send", wrap=core_output),
    Row(f"{_CORE_PROC}.process_input_sockets", "input", "idle", "idle", wrap=core_input),
    Row(f"{_CORE_PROC}.preprocess_add_request", "input", "preprocess"),
    Row(f"{_DP_PROC}._has_global_unfinished_reqs", "main", "dp_sync", "wait", on=CORE),
    Row("vllm.v1.engine.core:EngineCore._initialize_kv_caches", "main", "kv_init", "start"),
    Row(f"{_SCHEDULER}.schedule", "main", "schedule"),
    Row(f"{_SCHEDULER}.update_from_output", "main", "update"),
    Row(f"{_SCHEDULER}.set_pause_state", "main", "paused", "pause", wrap=pause_state),
    Row(
        "vllm.v1.executor.multiproc_executor:FutureWrapper.result",
        "main",
        "wait_worker",
        "wait",
        on=WORKERS,
        wrap=wait_worker,
    ),
    Row(
        "vllm.v1.executor.multiproc_executor:WorkerProc.wait_for_ready",
        "main",
        "wait_worker_start",
        "start",
    ),
    Row(
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.collective_rpc",
        "main",
        "exec",
        wrap=uniproc_rpc,
    ),
    Row(
        "vllm.v1.executor.uniproc_executor:AsyncOutputFuture.result",
        "main",
        "out_copy",
    ),
    Row(
        "vllm.v1.fault_tolerance.engine_core_sentinel:EngineCoreSentinel.on_fault",
        "main",
        "ft_parked",
        "pause",
        wrap=parked,
        since="0.27",
    ),
)

WORKER_ROWS = (
    Row(f"{_WORKER_PROC}.worker_busy_loop", "main", "serve", wrap=worker_loop),
    Row(f"{_WORKER_PROC}._execute_worker_rpc", "main", "rpc", wrap=worker_rpc, since="0.29"),
    Row(f"{_WORKER_PROC}.async_output_busy_loop", "output", "out_copy", wrap=worker_output),
    # Reached by self.worker through __getattr__: a class attribute beats it, for every platform's
    # worker and every executor, without importing a worker module.
    Row(f"{_WRAPPER}.init_device", "main", "init_device", "start", forward="worker"),
    Row(f"{_WRAPPER}.load_model", "main", "load_model", "start", forward="worker"),
    Row(f"{_WRAPPER}.execute_model", "main", "execute_model", wrap=note_error, forward="worker"),
    Row(f"{_WRAPPER}.sample_tokens", "main", "sample_tokens", wrap=note_error, forward="worker"),
    Row(
        "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.enqueue",
        HERE,
        "rpc_send",
        "wait",
        wrap=send,
    ),
    _start(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model", "load_weights"
    ),
    _start("vllm.model_executor.warmup.kernel_warmup:kernel_warmup", "kernel_warmup"),
    _start("vllm.v1.worker.gpu.warmup:warmup_kernels", "warmup_kernels"),
    _start(f"{_RUNNER}.profile_run", "profile_run"),
    _start(f"{_RUNNER}.capture_model", "capture"),
    _start(f"{_RUNNER2}.capture_model", "capture"),
    Row(f"{_RUNNER}.synchronize_input_prep", HERE, "input_sync", since="0.25"),
    Row(f"{_RUNNER}._bookkeeping_sync", HERE, "bookkeeping_sync"),
    Row(
        "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.pre_forward",
        HERE,
        "kv_load",
    ),
    Row(
        "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.post_forward",
        HERE,
        "kv_save",
    ),
)
