"""Warm-up: tasks from specs, callbacks around them, the count of what was compiled."""

from dataclasses import dataclass

import numpy as np
import pytest

from stallwatch_kernels import jit, warmup
from stallwatch_kernels.warmup import Shapes, Task, UnknownSpec, WarmupFailed


@jit.kernel
def doubled(values):
    for i in range(values.shape[0]):
        values[i] = values[i] * 2


@dataclass(frozen=True)
class DoubleSpec:
    dtype: str


@warmup.of(DoubleSpec)
def _warm(spec, shapes):
    for rows in shapes.rows:
        yield Task(f"double {spec.dtype} x{rows}", lambda n=rows: doubled(np.zeros(n, spec.dtype)))


def test_tasks_follow_specs_and_shapes_without_repeats():
    """Every spec is warmed up at every row count, and equal specs only once."""
    found = warmup.tasks([DoubleSpec("f4"), DoubleSpec("f4")], Shapes(rows=(1, 4)))

    assert [t.name for t in found] == ["double f4 x1", "double f4 x4"]


@pytest.mark.slow
def test_run_returns_what_was_compiled_and_then_nothing():
    """The first run reports the new signature of each dtype; a second one compiles nothing."""
    todo = warmup.tasks([DoubleSpec("f4"), DoubleSpec("f8")], Shapes())
    name = next(n for n in jit.signatures() if n.endswith("doubled"))

    first = warmup.run(todo)
    assert len(first[name]) == 2
    assert warmup.run(todo) == {}


def test_callbacks_surround_each_task():
    """on_start comes before the task can block and on_done after it, in order."""
    seen = []
    todo = [Task(n, lambda n=n: seen.append(f"run {n}")) for n in ("a", "b")]

    warmup.run(
        todo, lambda t: seen.append(f"start {t.name}"), lambda t: seen.append(f"done {t.name}")
    )

    assert seen == ["start a", "run a", "done a", "start b", "run b", "done b"]


def test_failing_task_is_named_and_ends_the_warmup():
    """The error names the task and chains the cause; later tasks do not run and on_done is not called."""
    seen = []

    def broken():
        raise ZeroDivisionError("no rows")

    todo = [Task("conv bf16", broken), Task("later", lambda: seen.append("later"))]
    with pytest.raises(
        WarmupFailed, match="conv bf16 failed: ZeroDivisionError: no rows"
    ) as failed:
        warmup.run(todo, on_done=lambda t: seen.append(t.name))

    assert failed.value.task == "conv bf16"
    assert seen == []


def test_unknown_spec_and_senseless_shapes_are_refused():
    """A spec nobody registered and a shape below one are errors, not skipped work."""
    with pytest.raises(UnknownSpec, match="no warm-up for str"):
        warmup.tasks(["conv"], Shapes())
    with pytest.raises(ValueError, match="positive"):
        Shapes(rows=(0,))
