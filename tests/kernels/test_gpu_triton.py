"""The Triton kernels, interpreted, against their torch references; and compiled for devices that are not here."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from stallwatch_kernels import gpu

TESTS = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def run(tmp_path):
    """Runs a script in a process of its own, whose compiled code goes away with the test: its JSON object."""
    pytest.importorskip("triton")
    return lambda script, *arguments, interpret: result_of(tmp_path, script, arguments, interpret)


def result_of(folder, script, arguments, interpret):
    environ = {
        **os.environ,
        "TRITON_INTERPRET": str(int(interpret)),
        "OMP_NUM_THREADS": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join((str(TESTS.parent / "kernels"), str(TESTS))),
    }
    done = subprocess.run(
        [sys.executable, TESTS / script, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def near(case, found):
    """float32: 1e-6 of float64. 16 bits: at most 1 step, on at most 1 % of the elements."""
    assert found["finite"], case
    if "share" in found:
        assert found["steps"] <= 1, case
        assert found["share"] <= 0.01, case
    else:
        assert found["rel"] <= 1e-6, case


def test_page4_equals_float64_for_every_dtype_on_troublesome_rows(run):
    """Grouped and ungrouped, over fp32, fp16, bf16 and E4M3 caches, with stale, -1, out-of-range and empty
    rows amid NaN memory; other pages give the same bits; 16-bit products stay within their own rounding."""
    found = run("triton_cases.py", "page4", str(random.randrange(2**31)), interpret=True)
    judged = [name for name in found if name.endswith("grouped") and "moved" not in name]
    for name in judged:
        near(name, found[name])
    empty = [of for name, of in found.items() if name.endswith("empty rows")]

    assert len(judged) == 12
    assert [of["nonzero"] for of in empty] == [0] * 6
    assert all(of["reuse"] > 1.2 for of in empty)
    for how in ("ungrouped", "grouped"):
        assert found[f"moved {how}"] == {"same": True, "moved": True}
    assert found["16-bit products"]["rel"] <= 1e-3


def test_gather_equals_the_reference_bit_for_bit_in_every_format(run):
    """Six formats, dequantised to float32 and cast once to float32, bfloat16 and float16."""
    found = run("triton_cases.py", "gather", str(random.randrange(2**31)), interpret=True)

    assert len(found) == 18
    assert {name for name, of in found.items() if not of["same"]} == set()
    assert all(of["size"] == 240 for of in found.values())


def test_routed_nvfp4_gemm_equals_float64_in_both_layouts(run):
    """0, 1, 80 and 81 routed rows with repeated and empty experts, gate and up under globals of their own."""
    found = run("triton_cases.py", "routed", str(random.randrange(2**31)), interpret=True)
    for name, of in found.items():
        near(name, of)

    assert sorted({of["rows"] for of in found.values()}) == [0, 1, 80, 81]
    assert len(found) == 9


def test_bad_input_is_refused_by_name(run):
    """Wrong types, shapes, scales, offsets, and products the interpreter gets wrong: each names its argument."""
    found = run("triton_cases.py", "refused", str(random.randrange(2**31)), interpret=True)

    assert {name: of["refused"] for name, of in found.items()} == {
        "q": "q, k",
        "q head": "q",
        "scales": "scales",
        "counts": "counts",
        "bf16 products": "q",
        "rows": "rows",
        "row type": "rows",
        "x": "x",
        "order": "global_scale",
    }


def test_kernels_compile_to_machine_code_for_devices_that_are_not_here(run):
    """Every kernel, in fp32 and E4M3, through the compilers of SM90 and gfx942: what the interpreter accepts
    is not yet a program."""
    found = run("triton_compile.py", interpret=False)

    assert sorted(found) == ["cuda 90", "hip gfx942"]
    for kernels in found.values():
        assert len(kernels) == 12
        assert all(size > 1000 for size in kernels.values())


def test_usable_says_why_not(monkeypatch):
    """Without a device the refusal says so and names the interpreter; interpreted, there is none."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "TRITON_INTERPRET=1" in (gpu.refusal() or "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu.refusal() is None
