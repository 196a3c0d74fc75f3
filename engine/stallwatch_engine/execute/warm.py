"""Compile everything and run every shape once, before the first request."""

from __future__ import annotations

import logging

import torch

from stallwatch.heartbeat import Lane
from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.execute.executor import Executor
from stallwatch_engine.model.forward import Forward
from stallwatch_engine.state.stores import StoreSpec
from stallwatch_kernels import warmup
from stallwatch_kernels.gdn.conv import ConvSpec
from stallwatch_kernels.gdn.recurrence import DeltaSpec
from stallwatch_kernels.gdn.reference import Heads as GdnHeads
from stallwatch_kernels.hc.mixer import MixerSpec
from stallwatch_kernels.linear.skinny import LinearSpec
from stallwatch_kernels.moe.experts import ExpertsSpec
from stallwatch_kernels.norm.rms import RmsSpec
from stallwatch_kernels.ple.conv import PleConvSpec
from stallwatch_kernels.ple.gate import GateSpec
from stallwatch_kernels.qsa.page4 import Spec
from stallwatch_kernels.qsa.project import Heads, ProjectSpec
from stallwatch_kernels.qsa.warm import IndexerSpec

LIMIT_S = 1800.0

log = logging.getLogger("stallwatch.worker")


def specs(config: ModelConfig, stores: StoreSpec) -> list[object]:
    """Every kernel that this model uses, as typed specs."""
    dtype, gdn, qsa, hyper = stores.dtype, config.gdn, config.qsa, config.hyper
    heads = GdnHeads(gdn.key_heads, gdn.value_heads, gdn.key_dim, gdn.value_dim)
    attention = Heads(qsa.query_heads, qsa.kv_heads, qsa.head_dim, qsa.index_heads, qsa.index_dim)
    found: list[object] = [
        LinearSpec(config.hidden, config.hidden, dtype),
        MixerSpec(hyper.streams, config.hidden, hyper.rank, dtype),
        MixerSpec(hyper.streams, config.hidden, hyper.rank, dtype, fold=True),
        ConvSpec(gdn.channels, dtype),
        DeltaSpec(heads, dtype),
        RmsSpec(gdn.values, gdn.value_dim, dtype, gated=True, activation=gdn.gate),
        ExpertsSpec(1),
        ProjectSpec(attention, dtype, stores.kv_dtype),
        IndexerSpec(qsa.index_heads, qsa.index_dim, dtype),
        Spec(
            q_heads=qsa.query_heads,
            kv_heads=qsa.kv_heads,
            size=qsa.head_dim,
            page=stores.page_size,
            q_dtype=torch.float32,
            cache_dtype=stores.kv_dtype,
        ),
    ]
    ple = config.ple
    if ple is not None:
        found += [
            GateSpec(hyper.streams, config.hidden, dtype),
            PleConvSpec(config.residual, ple.conv_kernel, ple.numbers.ngram_size, dtype),
        ]
    return found


def warm_up(executor: Executor, config: ModelConfig, stores: StoreSpec, lane: Lane) -> None:
    """Compile every signature, then prepare every declared shape; the lane counts both.

    Needs neither pages nor slots: a pool that is smaller than a shape changes nothing.
    """
    shapes = warmup.Shapes(rows=(1, 8), requests=1, context=config.qsa.budget)
    compiled_forward = isinstance(executor.forward, Forward)
    todo = warmup.tasks(specs(config, stores), shapes) if compiled_forward else []
    with lane.phase("compile_kernels", cls="start", limit=LIMIT_S):
        done = 0

        def begun(task: warmup.Task) -> None:
            nonlocal done
            done += 1
            lane.enter(
                "compile_kernel", "start", LIMIT_S, text=task.name, number=done, of=len(todo)
            )

        compiled = warmup.run(todo, begun, lambda _task: lane.progress(1))
    log.info("%d kernels ready, %d compiled or loaded", len(todo), len(compiled))
    wanted = executor.settings.shapes
    decode = [n for n in range(1, executor.buffers.requests + 1) if wanted is None or n in wanted]
    with lane.phase("prepare_shapes", cls="start", limit=LIMIT_S):
        executor.prepare_prefill()
        for number, requests in enumerate(reversed(decode), 1):
            lane.enter(
                "prepare_shape",
                "start",
                LIMIT_S,
                text=f"C{requests}",
                number=number,
                of=len(decode),
            )
            executor.prepare(requests)
            lane.progress(1)
    log.info("%s", executor.coverage)
