"""From a checkpoint to an executor that has compiled and prepared everything: the start of a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from stallwatch.heartbeat import Board, Lane
from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.table_spec import table_spec
from stallwatch_engine.checkpoint.view import CheckpointView
from stallwatch_engine.checkpoint.weights import LoadProgress, ModelWeights, load_weights
from stallwatch_engine.execute.executor import Executor, Lanes, Machine
from stallwatch_engine.execute.streams import open_streams
from stallwatch_engine.execute.warm import warm_up
from stallwatch_engine.faults import Faults
from stallwatch_engine.output.answers import Answer
from stallwatch_engine.ple.open import open_backend
from stallwatch_engine.ple.protocol import PleBackend
from stallwatch_engine.ple.shape import PleShape
from stallwatch_engine.ple.spec import TableSpec
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.state.stores import StateStores
from stallwatch_engine.worker.options import WorkerOptions
from stallwatch_kernels.pool import RowPool

LOAD_LIMIT_S = 1800.0
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Built:
    """A worker's parts, ready to serve."""

    config: ModelConfig
    limits: Limits
    stores: StateStores
    executor: Executor
    dtype: torch.dtype


@contextlib.contextmanager
def build(
    options: WorkerOptions,
    board: Board,
    lane: Lane,
    deliver: Callable[[Answer], None],
    *,
    faults: Faults,
) -> Iterator[Built]:
    """Everything is open inside the context. Enter it in the main thread.

    Raises BadCheckpoint, BadOptions, and what a PLE backend raises at its start; everything that the operator
    must correct before the weights are read.
    """
    torch.set_num_threads(options.threads)
    with contextlib.ExitStack() as stack:
        view = stack.enter_context(CheckpointView.open(Path(options.model)))
        config, dtype = view.config, options.dtype_of(view.config)
        limits, settings, ple = options.limits(config), options.execute(), options.ple()
        spec = options.stores(config, limits)
        options.check_device()
        tables = table_spec(view, dtype=str(dtype).removeprefix("torch."))
        backend: PleBackend | None = None
        if (
            tables is not None
        ):  # before the weights: a folder that is another checkpoint's is told soon
            shape = _shape(tables, limits)
            backend = stack.enter_context(
                open_backend(ple, tables, shape, lane=lane, faults=faults)
            )
        weights = _load(view, dtype, options.device, lane)
        view.close()
        pool = RowPool(options.threads)
        stack.callback(pool.close)
        with lane.phase("allocate_state", cls="start", limit=LOAD_LIMIT_S):
            stores = StateStores(config, spec)
        streams = open_streams(torch.device(options.device), board, faults)
        stack.callback(_quietly, streams.close)
        stack.callback(streams.abort)
        lanes = Lanes(lambda: board.lane("ple-request"), lambda: board.lane("output"))
        with lane.phase("bind_model", cls="start", limit=LOAD_LIMIT_S):
            executor = Executor(
                weights,
                stores,
                limits=limits,
                settings=settings,
                backend=backend,
                machine=Machine(streams, lanes, pool),
                deliver=deliver,
                faults=faults,
            )
        del weights  # merged projections have taken the place of most of them
        stack.callback(_quietly, executor.close)
        if backend is not None:
            stack.callback(backend.fail, RuntimeError("the worker ends"))
        stack.callback(streams.abort)
        warm_up(executor, config, spec, lane)
        yield Built(config, limits, stores, executor, dtype)


def _load(view: CheckpointView, dtype: torch.dtype, device: str, lane: Lane) -> ModelWeights:
    with lane.phase("load_weights", cls="start", limit=LOAD_LIMIT_S):

        def progress(done: LoadProgress) -> None:
            lane.enter(
                "load_weights",
                "start",
                LOAD_LIMIT_S,
                tensors=done.tensors,
                total=done.tensors_total,
            )

        return load_weights(view, dtype=dtype, device=device, progress=progress)


def _shape(tables: TableSpec, limits: Limits) -> PleShape:
    return PleShape(
        layers=tuple(layer.name for layer in tables.layers),
        embed=tables.ngram.embed_dim,
        ngram=tables.ngram.ngram_size,
        dtype=tables.dtype,
        max_tokens=limits.token_budget,
        max_requests=limits.max_seqs,
        max_in_flight=limits.max_in_flight,
    )


def _quietly(close: Callable[[float], None]) -> None:
    """At the end a thread that does not end must not keep the others from ending: the process goes anyway."""
    with contextlib.suppress(Exception):
        close(CLOSE_S)
