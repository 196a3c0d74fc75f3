"""Reports on a narrow terminal: nothing is lost, nothing is wider, continuations are indented."""

from __future__ import annotations

import itertools
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.evidence import text, waits
from stallwatch.evidence.wrap import LEAST, wrap
from stallwatch.testing.service import stall_report

ROOT = Path(__file__).resolve().parents[2]
WORDS = st.text("ab/:._-()", min_size=1, max_size=30)


@given(st.lists(st.lists(WORDS, max_size=20).map(" ".join), max_size=5), st.integers(1, 200))
def test_every_word_is_kept_and_no_line_is_wider(lines, width):
    """Joined again the text is the same, and no line is wider than was asked for."""
    out = list(wrap(lines, width))
    assert max(map(len, out), default=0) <= max(width, LEAST)
    assert "".join("".join(out).split()) == "".join("".join(lines).split())


@pytest.mark.parametrize(
    ("line", "indent"),
    [
        ("kind      " + "word " * 30, 10),
        ("      2.1 s  " + "word " * 30, 13),
        ("  worker:0/model: " + "word " * 30, 4),
        ("A sentence of " + "words " * 30, 2),
    ],
)
def test_a_continuation_stands_under_its_text(line, indent):
    """Labels and times keep their column; other lines go in by two."""
    first, second, *_ = wrap([line], 80)
    assert first == line[: len(first)]
    assert len(second) - len(second.lstrip()) == indent


def graph(*edges: str) -> dict[str, Any]:
    found = stall_report("st-20261130T031502Z-9f2c41aa")
    pairs = [edge.split(">") for edge in edges]
    found["wait_graph"]["edges"] = [{"waiter": a, "target": b, "why": ""} for a, b in pairs]
    return found


@pytest.mark.parametrize(
    ("edges", "says"),
    [
        (("a:0/x>b:0/y", "b:0/y>c:0/z", "c:0/z>a:0/x"), "a:0/x -> b:0/y -> c:0/z -> a:0/x"),
        (("d:0/w>a:0/x", "a:0/x>b:0/y", "b:0/y>a:0/x"), "a:0/x -> b:0/y -> a:0/x"),
        (("a:0/x>a:0/x",), "a:0/x -> a:0/x"),
    ],
)
def test_a_circle_of_waits_is_written_as_one(edges, says):
    """Who waits for whom begins with the circle, without those who only wait for it."""
    lines = list(text.render(graph(*edges)))
    assert lines[lines.index("Who waits for whom") + 1] == f"  in a circle: {says}"


def lane(address: str, cls: str, age: float, limit: float | None = 60.0) -> dict[str, Any]:
    return {"address": address, "class": cls, "phase": cls, "age_s": age, "limit_s": limit}


@pytest.mark.parametrize(
    ("kind", "lanes", "why", "told"),
    [
        ("CHILD_DIED", (("wait", 61.0), ("wait", 61.0)), "", True),
        ("CHILD_DIED", (("wait", 61.0), ("wait", 0.2)), "", False),
        ("PROCESS_STOPPED", (("wait", 61.0), ("idle", 61.0)), "idle", False),
        ("PROCESS_STOPPED", (("wait", 61.0), ("wait", 61.0)), "idle", False),
        ("ORDER_CYCLE", (("wait", 61.0), ("wait", 59.0)), "", True),
        ("ORDER_CYCLE", (("wait", 61.0), ("idle", 59.0)), "idle", False),
    ],
)
def test_idle_and_young_waits_are_no_circle(kind, lanes, why, told):
    """Only waits that are over their limit hold each other up, or those that the verdict rests on."""
    found = graph("a:0/x>b:0/y", "b:0/y>a:0/x")
    found["kind"], found["kinds"] = kind, [kind]
    found["wait_graph"]["edges"][1]["why"] = why
    both = zip(("a:0/x", "b:0/y"), lanes, strict=True)
    found["processes"] = [{"lanes": [lane(name, *seen)]} for name, seen in both]
    lines = "\n".join(text.render(found))
    assert ("in a circle: a:0/x -> b:0/y -> a:0/x" in lines) is told
    assert "  a:0/x -> b:0/y\n" in lines


def test_a_chain_is_no_circle():
    """Edges that meet again without closing are not called a circle."""
    lines = "\n".join(text.render(graph("a>b", "a>c", "b>d", "c>d")))
    assert "in a circle" not in lines
    assert "  a -> b\n" in lines


def test_nobody_waits_is_said():
    """Without edges the question is answered too."""
    assert "  no lane has named another one that it waits for" in text.render(graph())


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), max_size=40))
def test_a_circle_is_found_exactly_when_there_is_one(pairs):
    """Against the plain definition: some lane reaches itself."""
    found = waits.circle([{"waiter": a, "target": b} for a, b in pairs])
    reach = set(pairs)
    for _ in range(6):
        reach |= {(a, d) for a, b in reach for c, d in reach if b == c}
    assert bool(found) == any(a == b for a, b in reach)
    assert set(itertools.pairwise(found)) <= set(pairs)


SHOW = """
import json, sys
from stallwatch.cli import stalls
from stallwatch.cli.main import main
report = json.load(open(sys.argv[1]))
class Kept:
    def report(self, _): return report
stalls.reports = lambda: Kept()
sys.exit(main(["show", report["id"], *sys.argv[2:]]))
"""


def shown(tmp_path: Path, columns: int) -> str:
    """What `stallwatch show` writes to a terminal of that width."""
    found = graph("worker:0/" + "m" * 60 + ">core:0/" + "c" * 60)
    found["summary"] = "worker:0 \x1b[31mhas\x1b]0;pwn\x07 stood \u202e" + "still " * 60
    path = tmp_path / "report.json"
    path.write_text(json.dumps(found))
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "PYTHONPATH": str(ROOT / "supervisor")}
    process = subprocess.Popen([sys.executable, "-c", SHOW, str(path)], stdout=slave, env=env)
    os.close(slave)
    out = b""
    try:
        while part := os.read(master, 65536):
            out += part
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(30) == 0
    return out.decode().replace("\r\n", "\n")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_a_report_fits(tmp_path, columns):
    """`show` on a real terminal: no line is wider, and none of its escapes arrives."""
    out = shown(tmp_path, columns)
    assert max(map(len, out.splitlines())) <= columns
    assert out.replace("\n", "").isprintable()
    assert "Who waits for whom" in out
