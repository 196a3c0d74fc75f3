"""What threads sleep on, read from a real /proc: pipes, their ends, lock files."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from stallwatch.watch import objects
from stallwatch.watch.objects import LockFile, Objects, Question, cache_folders, find


def lock_of(question: Question) -> LockFile | None:
    return next(iter(find(question, deadline_s=5.0).locks), None)


def test_nothing_asked_nothing_read():
    """No thread on a pipe or a lock: no file is touched."""
    assert find(Question(members=(os.getpid(),))) == Objects()


def test_a_lock_file_that_the_engine_names_is_found(tmp_path):
    """The path in a text, the file there, nobody holding it."""
    path = tmp_path / "build.lock"
    path.write_text("99999999")
    found = lock_of(Question(polling=True, texts=(f"waiting for {path} ...",)))
    assert found is not None
    assert (found.path, found.holder, found.named) == (str(path), 0, True)


def test_a_lock_file_that_is_gone_or_held_is_no_stale_one(tmp_path):
    """No file, no answer; a living pid in it, or a flock on it, is its holder."""
    path = tmp_path / "build.lock"
    question = Question(polling=True, texts=(str(path),))
    assert lock_of(question) is None
    path.write_text(f"{os.getpid()}\n")
    assert lock_of(question).holder == os.getpid()
    path.write_text("")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_of(question).holder == os.getpid()
    assert lock_of(question).holder == 0


def test_caches_are_searched_within_bounds(tmp_path):
    """A lock in a compiler's cache is found, not beyond four levels, and says that nobody named it."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    deep = tmp_path.joinpath(*"123456789")
    deep.mkdir(parents=True)
    (deep / "lock").touch()
    found = find(Question(polling=True, caches=(str(tmp_path),)), deadline_s=5.0).locks
    assert [x.path for x in found] == [str(folder / "lock")]
    assert not found[0].named
    assert f"{tmp_path}/.triton/cache" in cache_folders({"HOME": str(tmp_path)})


@pytest.mark.process
@pytest.mark.slow
def test_both_ends_of_a_pipe_are_told():
    """A child asleep in read(): who could still write to it; one with its parent's line: a twin."""
    code = "import os; os.read(0, 1)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        thread = (child.pid, child.pid)
        asleep = threading.Event()
        for _ in range(250):
            with open(f"/proc/{child.pid}/wchan") as file:
                if "pipe" in file.read():
                    break
            asleep.wait(0.02)  # a poll with a deadline
        question = Question(
            reading=(thread,), members=(child.pid,), children=((child.pid, os.getpid()),)
        )
        found = find(question, deadline_s=5.0)
        assert found.writers[thread] == (os.getpid(),)
        assert found.twins == frozenset()
        same = Question(children=((child.pid, child.pid),))
        assert find(same, deadline_s=5.0).twins == {child.pid}
    finally:
        child.kill()
        child.communicate()


def test_looks_that_hang_are_few_and_later_ones_say_nothing(monkeypatch):
    """Storage that is gone keeps a thread for ever: a few are lost to it, not one for each stall."""
    gate = threading.Event()

    def hang(*_: object) -> Objects:
        gate.wait(10)
        return Objects()

    monkeypatch.setattr(objects, "_find", hang)
    before = threading.active_count()
    try:
        for _ in range(3 * objects.MAX_LOOKING):
            assert find(Question(polling=True), deadline_s=0.01) == Objects()
        assert threading.active_count() - before == objects.MAX_LOOKING
    finally:
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "stallwatch-objects":
                thread.join(5)
    assert threading.active_count() == before


def test_without_a_thread_to_be_had_there_is_no_hint_and_no_error(monkeypatch):
    """At pids.max a verdict is still reached."""

    def refuse(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2 * objects.MAX_LOOKING):
        assert find(Question(polling=True)) == Objects()
