"""`stallwatch chaos run`: a scenario program under a supervisor of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemon_helpers import STALLWATCH

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "scenarios" / "programs"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the path of a socket has room for 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="swt-") as path:
        yield Path(path)


def chaos_run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("STALLWATCH")}
    path = f"{ROOT / 'supervisor'}{os.pathsep}{env.get('PYTHONPATH', '')}"
    return subprocess.run(
        [STALLWATCH, "chaos", "run", *words],
        capture_output=True,
        text=True,
        timeout=100,
        env={**env, "TMPDIR": str(tmp_path), "PYTHONPATH": path.rstrip(os.pathsep)},
        check=False,
    )


def left(tmp_path: Path) -> list[str]:
    """Folders in TMPDIR, and processes that name it."""
    found = [p.name for p in tmp_path.iterdir() if p.name.startswith(("stallwatch-", "sw-"))]
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(str(tmp_path) in word for word in words):
            found.append(" ".join(process.info["cmdline"] or ["?"]))
    return found


def test_a_scenario_is_graded_and_nothing_is_left(tmp_path):
    """GIL held: kind, culprit and action of the header; exit 0; no process and no folder stays."""
    done = chaos_run(tmp_path, str(PROGRAMS / "k08_gil_held.py"), "--seed", "5", "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    (card,) = json.loads(done.stdout)["items"]
    assert (card["kind"], card["grade"], card["seed"]) == ("GIL_HELD", "right", 5)
    assert card["action"] == "restart"
    assert left(tmp_path) == []


def test_a_wrong_expectation_is_graded_wrong(tmp_path):
    """The same program under a header that expects something else: wrong, exit 3, and why."""
    for name in ("k08_gil_held.py", "stage.py"):
        text = (PROGRAMS / name).read_text()
        (tmp_path / name).write_text(text.replace('kind = "GIL_HELD"', 'kind = "LOST_WAKEUP"'))
    done = chaos_run(tmp_path, str(tmp_path / "k08_gil_held.py"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "found      GIL_HELD" in done.stdout
    assert "grade      wrong: the kind is GIL_HELD" in done.stdout
    assert left(tmp_path) == []


def test_a_program_that_must_stay_quiet_does(tmp_path):
    """An idle engine, watched for its own time: no verdict, right."""
    done = chaos_run(tmp_path, str(PROGRAMS / "f02_idle.py"), "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    (card,) = json.loads(done.stdout)["items"]
    assert (card["kind"], card["grade"]) == ("", "right")


def test_no_scenario_is_started_when_one_cannot_be_read(tmp_path):
    """A path without a header beside a good one: one sentence, and no supervisor was started."""
    bad = tmp_path / "plain.py"
    bad.write_text("print(1)\n")
    done = chaos_run(tmp_path, str(PROGRAMS / "k08_gil_held.py"), str(bad))
    assert done.returncode == 1
    assert "plain.py has no scenario header" in done.stderr
    assert done.stdout == ""
