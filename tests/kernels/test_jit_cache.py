"""Kernels on a system where nothing can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stallwatch_kernels
from stallwatch_kernels.stale import drop_stale_code

CODE = """
import numpy as np
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.tensors import bf16_to_f32
from twice import twice
print(kernel(twice)(21.0))
"""


@pytest.mark.process
@pytest.mark.slow
def test_without_a_place_for_the_cache_kernels_compile_all_the_same(tmp_path: Path) -> None:
    """A cache folder that cannot be made costs the cache and nothing else."""
    (tmp_path / "twice.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "file").write_text("in the way")
    roots = [str(tmp_path), str(Path(stallwatch_kernels.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={
            **os.environ,
            "NUMBA_CACHE_DIR": str(tmp_path / "file" / "cache"),
            "PYTHONPATH": os.pathsep.join(roots),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "42.0\n", done.stderr[-2000:]


def test_an_edited_helper_drops_the_machine_code_of_its_callers(tmp_path: Path) -> None:
    """The stamp follows every source: unchanged keeps the cache, changed drops it, once."""
    cache = tmp_path / "qsa" / "__pycache__"
    cache.mkdir(parents=True)
    helper, code = tmp_path / "helper.py", cache / "attend.1.nbc"
    helper.write_text("a = 1\n")
    assert drop_stale_code(tmp_path, "")
    code.write_bytes(b"machine code")
    assert not drop_stale_code(tmp_path, "")
    assert code.exists()
    helper.write_text("a = 2\n")
    assert drop_stale_code(tmp_path, "")
    assert not code.exists()
    assert not drop_stale_code(tmp_path, "")


CALLER = """
import sys
from pathlib import Path
from stallwatch_kernels.stale import drop_stale_code
drop_stale_code(Path(sys.argv[1]) / "pack")
sys.path.insert(0, sys.argv[1])
from pack.caller import called
print(called(1.0))
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_cache_folder_of_ones_own_is_kept_fresh_too(tmp_path: Path) -> None:
    """Under NUMBA_CACHE_DIR the caller of an edited helper is compiled again, and an unedited one is not."""
    pack, cache = tmp_path / "pack", tmp_path / "cache"
    pack.mkdir()
    (pack / "__init__.py").touch()
    (pack / "caller.py").write_text(
        "from numba import njit\nfrom pack.helper import helped\n\n\n"
        "@njit(cache=True)\ndef called(x):\n    return helped(x)\n"
    )

    def result(number: int) -> str:
        (pack / "helper.py").write_text(
            f"from numba import njit\n\n\n@njit(cache=True)\ndef helped(x):\n    return x + {number}\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", CALLER, str(tmp_path)],
            env={
                **os.environ,
                "NUMBA_CACHE_DIR": str(cache),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": str(Path(stallwatch_kernels.__file__).parents[1]),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    assert result(1) == "2.0"
    kept = {f.name: f.stat().st_mtime_ns for f in cache.rglob("caller*.nbc")}
    assert result(1) == "2.0"
    assert {f.name: f.stat().st_mtime_ns for f in cache.rglob("caller*.nbc")} == kept
    assert result(2) == "3.0"
