"""Parsers of what tools and workers write: total, capped, and free of control characters."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.evidence import faulthandler, gpu, procfacts
from stallwatch.evidence.clean import clean, clean_bytes
from stallwatch.evidence.model import Frame, ThreadStack
from stallwatch.evidence.pyspy import MAX_FRAMES, MAX_NAME, MAX_THREADS, explain, parse_dump

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
KEYS = ("os_thread_id", "thread_name", "frames", "active", "owns_gil", "x")
THREADS = st.lists(st.dictionaries(st.sampled_from(KEYS), JSON), max_size=4)
FRAME = {"name": "f", "filename": "/a/b/m.py", "short_filename": "b/m.py", "line": 3}


def test_a_dump_as_py_spy_writes_it():
    """The fields of py-spy 0.4 become a ThreadStack; unknown keys are ignored."""
    item = {"os_thread_id": 7, "thread_name": "T", "active": False, "owns_gil": True, "new": {}}
    threads, problem = parse_dump(json.dumps([{**item, "frames": [FRAME]}]).encode())
    assert threads == (ThreadStack(7, "T", (Frame("f", "b/m.py", 3),), False, True),)
    assert problem == ""


def test_the_long_name_serves_when_there_is_no_short_one():
    """A frame without short_filename shows its filename."""
    raw = json.dumps([{"frames": [{**FRAME, "short_filename": None}]}]).encode()
    assert parse_dump(raw)[0][0].frames[0].filename == "/a/b/m.py"


def test_sizes_are_capped_and_said():
    """Too many threads, frames and characters are cut; cut threads are counted."""
    frames = [{"name": "n" * (MAX_NAME + 1), "filename": "f", "line": 1}] * (MAX_FRAMES + 5)
    items = [{"frames": frames}, *[{"thread_name": "t"}] * (MAX_THREADS + 2)]
    threads, problem = parse_dump(json.dumps(items).encode())
    assert len(threads) == MAX_THREADS
    assert problem == "3 more threads were left out"
    assert len(threads[0].frames) == MAX_FRAMES
    assert len(threads[0].frames[0].name) == MAX_NAME


@pytest.mark.parametrize("raw", [b"", b"{}", b"[", b"[" * 100_000, b"[1, null]", b"\xff", b"[]"])
def test_what_is_no_dump_is_a_problem(raw):
    """Anything but a list of threads gives no thread and one sentence."""
    threads, problem = parse_dump(raw)
    assert threads == ()
    assert problem


@pytest.mark.slow
@settings(deadline=None)  # a loaded machine is no failure
@given(st.binary(max_size=200) | JSON.map(lambda v: json.dumps(v).encode()))
def test_random_bytes_never_raise(raw):
    """No input raises, and either threads or a problem come back."""
    threads, problem = parse_dump(raw)
    assert threads or problem


@pytest.mark.slow
@settings(deadline=None)  # a loaded machine is no failure
@given(THREADS)
def test_hostile_threads_are_typed_and_printable(items):
    """Whatever the values of known keys are, the result has the declared types."""
    threads, _ = parse_dump(json.dumps(items).encode())
    for thread in threads:
        assert type(thread.tid) is int
        assert thread.tid >= 0
        assert thread.name.isprintable()
        assert thread.owns_gil in (None, True, False)
        assert all(str(frame).isprintable() for frame in thread.frames)


@pytest.mark.parametrize(
    ("stderr", "state", "says"),
    [
        ("Error: Permission denied (os error 13)", "S", "CAP_SYS_PTRACE"),
        ("Error: EPERM: Operation not permitted", "S", "CAP_SYS_PTRACE"),
        ("Failed to get process executable name. Check that the process is running.", "S", "it is"),
        ("Failed to get process executable name. Check that the process is running.", "", "ended"),
        (
            "Failed to get process executable name. Check that the process is running.",
            "Z",
            "zombie",
        ),
        ("Failed to suspend process: unexpected waitpid result", "T", "stopped or traced"),
        ("Error: Failed to find python version from target process", "S", "pip install -U py-spy"),
        ("Error: something new\nStack backtrace:", "S", "py-spy: Error: something new"),
    ],
)
def test_refusals_become_clear_sentences(stderr, state, says):
    """Permission, death and version are told apart, with the state in /proc as judge."""
    assert says in explain(stderr.encode(), state=state)


@settings(deadline=None)  # a loaded machine is no failure
@given(st.binary(max_size=300), st.sampled_from(["", "S", "T", "Z"]))
def test_explaining_never_raises(stderr, state):
    """Any standard error gives one printable line, or nothing."""
    assert explain(stderr, state=state).isprintable()


def test_faulthandler_text_of_several_versions():
    """Thread heads with and without a name, frames, and 'no Python frame'."""
    text = (
        "Thread 0x00007f01 [worker] (most recent call first):\n"
        '  File "/a/b/c/d.py", line 12 in run\n'
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "x.py", line ??? in g\n  ...\n'
        "Thread 0x7f03 (most recent call first):\n  <no Python frame>\n"
    )
    threads = faulthandler.parse(text)
    assert [thread.name for thread in threads] == [
        "pthread 0x7f01 (worker)",
        "pthread 0x7f02",
        "pthread 0x7f03",
    ]
    assert threads[0].frames == (Frame("run", "c/d.py", 12),)
    assert threads[1].frames == (Frame("g", "x.py", 0),)


LINES = st.sampled_from(
    ['  File "a", line 1 in f', "Thread 0x1 (most", "Current thread 0xfffffffffffffffff", "\x1b[2J"]
)


@settings(deadline=None)  # a loaded machine is no failure
@given(st.lists(LINES | st.text(max_size=40), max_size=20).map("\n".join))
def test_faulthandler_text_never_raises(text):
    """Any text gives threads whose names and frames are printable."""
    for thread in faulthandler.parse(text):
        assert thread.name.isprintable()
        assert all(str(frame).isprintable() for frame in thread.frames)


@settings(deadline=None)  # a loaded machine is no failure
@given(st.text(max_size=400), st.integers(1, 64))
def test_clean_text_is_short_and_printable(text, cap):
    """No control character, no line break and no more than the cap survive cleaning."""
    out = clean(text, cap)
    assert len(out) <= cap
    assert out.isprintable()
    out.encode()  # no lone surrogate: it can be written as UTF-8


def test_clean_leaves_ordinary_text_alone():
    """Ordinary names in any script are unchanged; escapes and bidi overrides are not."""
    assert clean("Ordnung_ß 日本 é (a.py:1)") == "Ordnung_ß 日本 é (a.py:1)"
    assert clean("\x1b]0;x\x07\u202eab\u2028") == "?]0;x??ab?"
    assert clean_bytes(b"\xff\x00a") == "\ufffd?a"


@settings(deadline=None)  # a loaded machine is no failure
@given(st.binary(max_size=80))
def test_proc_lines_never_raise(raw):
    """Random bytes in place of syscall and stack files give short printable text."""
    assert procfacts._syscall(raw).isprintable()
    assert procfacts._stack_line(raw).isprintable()


@settings(deadline=None)  # a loaded machine is no failure
@given(st.binary(max_size=120))
def test_device_rows_never_raise(raw):
    """Random bytes in place of a device tool's CSV give rows of clean cells."""
    assert all(cell.isprintable() for row in gpu._rows(raw) for cell in row)
