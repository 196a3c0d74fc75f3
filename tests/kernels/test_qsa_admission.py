"""Who answers a page4 call: by type, by measured reuse, and said in words; and warm-up leaves nothing to compile."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stallwatch_kernels
from stallwatch_kernels import admission, jit, warmup
from stallwatch_kernels.moe import experts
from stallwatch_kernels.ple import gather, table
from stallwatch_kernels.qsa import calibrate, page4, reference, synthetic
from stallwatch_kernels.qsa.page4 import Spec
from stallwatch_kernels.qsa.plan import plan
from stallwatch_kernels.qsa.synthetic import Mix
from stallwatch_kernels.qsa.warm import IndexerSpec

SPEC = Spec(6, 1, 32, 8, torch.float32, torch.float32)


def test_eligibility_is_by_type_with_reasons() -> None:
    """An odd head size or another device has no compiled path, and the choice says why."""
    odd_spec = Spec(6, 1, 24, 8, torch.float32, torch.float32)
    usual = admission.choose("page4", page4.candidates(SPEC), environ={})
    odd = admission.choose("page4", page4.candidates(odd_spec), environ={})
    far = page4.candidates(Spec(6, 1, 32, 8, torch.float32, torch.float32, "cuda"))

    assert (usual.impl, odd.impl) == ("grouped", "reference")
    assert "24" in odd.reason
    assert [impl for impl, refusal in far if refusal is None] == ["reference"]


def test_too_few_rows_for_a_group_run_alone() -> None:
    """Seven rows make no group, whatever they share, and the reason says so."""
    settled = page4.settle(7, None, 1.0)

    assert settled.impl == "ungrouped"
    assert "7 rows" in settled.reason


@pytest.mark.slow
def test_the_operator_overrides_both_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """STALLWATCH_KERNEL_PAGE4 decides, for few rows too; a name that does not exist is an error."""
    mix = Mix(9, share=0.0)
    call = (
        synthetic.queries(6, 32, mix),
        synthetic.caches((1, 32, 8), mix),
        synthetic.rows(8, mix),
    )
    monkeypatch.setenv("STALLWATCH_KERNEL_PAGE4", "grouped")
    _, settled = page4.attend(*call, threshold=math.inf)
    monkeypatch.setenv("STALLWATCH_KERNEL_PAGE4", "fastest")
    with pytest.raises(admission.BadOverride):
        page4.attend(*call)

    assert settled.impl == "grouped"
    assert "STALLWATCH_KERNEL_PAGE4" in settled.reason


@pytest.mark.slow
def test_the_second_decision_follows_the_measured_reuse() -> None:
    """The same call is grouped under a threshold below its reuse and ungrouped above it; results agree."""
    mix = Mix(24, share=0.5)
    kv, rows = synthetic.caches((1, 32, 8), mix), synthetic.rows(8, mix)
    q = synthetic.queries(6, 32, mix)
    call = page4.prepare(q, kv, rows)
    reuse = plan(call.store, call.selection).reuse
    low, first = page4.attend(q, kv, rows, threshold=reuse - 0.01)
    high, second = page4.attend(q, kv, rows, threshold=reuse + 0.01)
    never, third = page4.attend(q, kv, rows, threshold=math.inf)

    assert (first.impl, second.impl, third.impl) == ("grouped", "ungrouped", "ungrouped")
    assert f"{reuse:.2f}" in first.reason
    assert third.reuse is None
    assert torch.equal(high, never)
    assert (low - high).norm() <= 1e-6 * high.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("share", "low", "high"), [(1.0, 7.0, 8.0), (0.0, 1.0, 4.0)])
def test_reuse_is_loads_alone_over_loads_together(share: float, low: float, high: float) -> None:
    """The plan's ratio is the sum of the rows' blocks over the size of their union, counted by hand."""
    mix = Mix(16, context=1024, budget=64, share=share)
    kv, rows = synthetic.caches((1, 16, 4), mix), synthetic.rows(4, mix)
    call = page4.prepare(synthetic.queries(1, 16, mix), kv, rows)
    made = plan(call.store, call.selection)
    alone = together = 0
    for group in range(2):
        sets = [
            {int(t) // 4 for t in rows.indices[row] if t >= 0}
            for row in range(8 * group, 8 * group + 8)
        ]
        alone += sum(len(s) for s in sets)
        together += len(set().union(*sets))

    assert (made.row_blocks, made.loads) == (alone, together)
    assert low <= made.reuse <= high


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_threshold_is_where_both_cost_the_same(cheap: float, dear: float) -> None:
    """On the line through both measurements a grouped row costs 1 at the threshold; if the line crosses 1
    nowhere above reuse 1, one side always wins."""
    threshold = calibrate.crossing((8.0, cheap), (1.0, dear))
    slope = (dear - cheap) / (1 - 1 / 8)
    base = cheap - slope / 8
    if 1 < threshold < math.inf:
        assert base + slope / threshold == pytest.approx(1, abs=1e-6)
        assert slope > 0
    elif threshold == math.inf:
        assert base >= 1 or (slope <= 0 and cheap > 1)
    else:
        assert dear <= 1 + 1e-9 or (slope <= 0 and cheap <= 1)


@pytest.mark.slow
def test_calibration_measures_both_ends() -> None:
    """A calibration holds two positive ratios, a threshold of at least 1, and says what it measured."""
    found = calibrate.calibrate(SPEC, 64, repeats=1)

    assert min(found.shared, found.apart) > 0
    assert found.threshold >= 1
    assert "grouping pays from" in found.reason


@pytest.mark.slow
def test_an_odd_head_size_is_answered_by_the_reference() -> None:
    """What no compiled path takes still gets its answer, and the reason says so."""
    mix = Mix(9)
    kv, rows = synthetic.caches((1, 24, 8), mix), synthetic.rows(8, mix)
    q = synthetic.queries(6, 24, mix)
    out, settled = page4.attend(q, kv, rows)

    assert settled.impl == "reference"
    assert "24" in settled.reason
    assert torch.equal(out, reference.attend(q, kv, rows).float())


@pytest.mark.slow
def test_nothing_compiles_after_the_warm_up() -> None:
    """Calls of a warmed spec with other rows, contexts and strides compile nothing."""
    todo = warmup.tasks([SPEC, IndexerSpec(4, 16)], warmup.Shapes(rows=(1, 8, 64), context=512))
    started: list[str] = []
    warmup.run(todo, on_start=lambda task: started.append(task.name))
    before = jit.signatures()
    for count in (1, 8, 21):
        mix = Mix(count, context=512, budget=128)
        kv, rows = synthetic.caches((1, 32, 8), mix), synthetic.rows(8, mix)
        page4.attend(synthetic.queries(6, 32, mix), kv, rows, threshold=1.0)

    assert {"page4 grouped float32", "page4 ungrouped float32", "indexer float32"} <= set(started)
    assert warmup.grown(before, jit.signatures()) == {}


INTERPRETED = """
import os, torch
from stallwatch_kernels.qsa import page4, reference, synthetic
from stallwatch_kernels.qsa.synthetic import Mix
mix = Mix(9, context=48, budget=16)
call = (synthetic.queries(2, 32, mix), synthetic.caches((1, 32, 8), mix), synthetic.rows(8, mix))
exact = reference.attend(*call)
for name in ("triton", "grouped"):
    os.environ["STALLWATCH_KERNEL_PAGE4"] = name
    for threshold in (1.0, 100.0):
        out, settled = page4.attend(*call, threshold=threshold)
        near = float((out - exact).norm() / exact.norm()) <= 1e-6
        print(settled.impl, near, settled.reason)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(120)
def test_triton_is_chosen_like_any_other_and_plans_by_the_same_threshold() -> None:
    """Interpreted, the override runs Triton's kernels, grouped or not by the measured reuse, and they are right."""
    pytest.importorskip("triton")
    root = str(Path(stallwatch_kernels.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()

    assert [line.split()[:2] for line in lines] == [["triton", "True"]] * 2 + [
        ["grouped", "True"]
    ] * 2
    assert "grouped: reuse" in lines[0]
    assert "ungrouped: reuse" in lines[1]


def test_every_op_says_why_triton_does_not_take_it() -> None:
    """Tensors, weights and tables in RAM: the refusal says so, or that there is no device; never silence."""
    spec = gather.GatherSpec(table.Format.FP8, torch.float32)
    for found in (
        page4.candidates(SPEC),
        gather.candidates(spec),
        experts.candidates(experts.ExpertsSpec(4)),
    ):
        assert dict(found)["triton"]
    with pytest.raises(admission.BadOverride, match="triton"):
        admission.choose(
            "page4", page4.candidates(SPEC), environ={"STALLWATCH_KERNEL_PAGE4": "triton"}
        )
