"""attach() finds the board or gives one that does nothing; it never raises and never hangs."""

from __future__ import annotations

import os
import time

import pytest

from heartbeat_helpers import folder_in, look, no_sleep, poke
from stallwatch import heartbeat
from stallwatch.board.reader import BoardReader
from stallwatch.heartbeat import layout
from stallwatch.heartbeat.memory import open_board


def use_everything(board: heartbeat.Board) -> None:
    """Every method of the library once."""
    lane = board.lane("model")
    lane.marker("a", "x", "y", limit=3)(1, 2)
    lane.marker("a")()
    lane.pusher("b", "x")(1)
    lane.pop()
    lane.enter("c", text="t", on="a:0/b", limit=3, x=1)
    lane.idle()
    lane.wait("d", on="a:0/b")
    lane.idle_marker()()
    lane.wait_marker("d", on="a:0/b")()
    with lane.phase("e", cls="start"):
        lane.progress(3)
    board.channel("stream").enter("kernel")
    board.lane("late", late=True).enter("x")
    board.pending(3)
    board.ready()
    with board.pause("p", seconds=1, owner="o"):
        pass
    assert board.failure() is None
    assert board.control() == 0
    lane.close()
    board.close()


@pytest.fixture
def folder(tmp_path):
    with folder_in(tmp_path) as folder:
        yield folder


def hostile_values(folder):
    """STALLWATCH_BOARD values by name; each must give a no-op board at once."""
    base = folder.path.parent
    os.mkfifo(_folder(base, "fifo") / "board")
    (_folder(base, "dir") / "board").mkdir()
    (_folder(base, "link") / "board").symlink_to(folder.file)
    (_folder(base, "empty") / "board").touch()
    (_folder(base, "text") / "board").write_text("hello " * 100_000)
    with open(_folder(base, "hole") / "board", "wb") as file:
        file.write(folder.file.read_bytes()[: layout.HEADER_SIZE])
        file.truncate(folder.file.stat().st_size)
    data = bytearray(folder.file.read_bytes())
    (_folder(base, "short") / "board").write_bytes(data[:-1])
    data[8] = 2
    (_folder(base, "version") / "board").write_bytes(data)
    data[8] = 1
    data[16:20] = (1 << 31).to_bytes(4, "little")
    (_folder(base, "sizes") / "board").write_bytes(data)
    names = ("fifo", "dir", "link", "empty", "text", "hole", "short", "version", "sizes", "gone")
    return [str(base / name) for name in names] + [
        "", ".", "/", "relative/path", "/dev", "/dev/null", "/proc/self", "x" * 10_000, "/\n\x1b[0m", "~", "//",
    ]  # fmt: skip


def _folder(base, name):
    (base / name / layout.CLAIMS).mkdir(parents=True)  # so that the board file alone decides
    return base / name


def test_a_hostile_variable_gives_a_silent_board(folder, monkeypatch):
    """No value of STALLWATCH_BOARD raises, hangs, or yields anything but a no-op board."""
    for value in hostile_values(folder):
        monkeypatch.setenv(layout.ENV, value)
        began = time.monotonic()
        board = heartbeat.attach("worker", dump_signal=0)
        assert not board.attached, value
        use_everything(board)
        assert time.monotonic() - began < 1, value


def test_no_variable_gives_a_silent_board(monkeypatch):
    """Without a supervisor the library does nothing."""
    monkeypatch.delenv(layout.ENV, raising=False)
    board = heartbeat.attach(lambda: pytest.fail("a role nobody needs"), dump_signal=0)
    assert not board.attached
    use_everything(board)


def test_a_good_variable_gives_the_same_board_to_everybody(folder, monkeypatch):
    """A second attach() of a process returns the first board, and a new one after goodbye."""
    monkeypatch.setenv(layout.ENV, str(folder.path))
    board = heartbeat.attach("worker", 3, dump_signal=0)
    assert board.attached
    assert heartbeat.attach("other", dump_signal=0) is board
    use_everything(board)
    again = heartbeat.attach("other", dump_signal=0)
    assert again is not board
    again.close()


def test_a_full_process_table_gives_a_silent_board(tmp_path, monkeypatch):
    """The process that finds no slot works on unseen."""
    with folder_in(tmp_path, processes=1) as folder:
        monkeypatch.setenv(layout.ENV, str(folder.path))
        first = heartbeat.attach("a", dump_signal=0)
        first.close()
        second = heartbeat.attach("b", dump_signal=0)
        assert not second.attached
        use_everything(second)


def test_claims_that_cannot_be_written_give_a_silent_board(folder, monkeypatch):
    """A claims folder that is gone is no reason to fail."""
    os.rename(folder.path / layout.CLAIMS, folder.path / "elsewhere")
    monkeypatch.setenv(layout.ENV, str(folder.path))
    board = heartbeat.attach("worker", dump_signal=0)
    assert not board.attached
    use_everything(board)


@pytest.mark.parametrize(
    ("answer", "address"),
    [
        ("core", "core:5"),
        (("worker", 3), "worker:3"),
        (("worker", 1 << 40), "worker:2147483647"),
        (None, "unknown:0"),
        (("a", "b", "c"), "unknown:0"),
        (ZeroDivisionError, "unknown:0"),
    ],
)
def test_a_role_may_be_asked_for_late(folder, monkeypatch, answer, address):
    """A role function is asked at the first lane; what it answers, or its failure, is no danger."""
    asked = []

    def role():
        asked.append(1)
        if answer is ZeroDivisionError:
            raise ZeroDivisionError
        return answer

    monkeypatch.setenv(layout.ENV, str(folder.path))
    board = heartbeat.attach(role, 5, dump_signal=0)
    assert not asked
    board.lane("x")
    board.lane("y")
    assert asked == [1]
    reader = BoardReader(folder.path, sleep=no_sleep)
    assert look(reader).processes[0].address == address
    reader.close()
    board.close()


def test_the_supervisor_pid_alone_is_not_believed(folder):
    """The header's pid counts as supervisor only with its start ticks."""
    memory = open_board(str(folder.path))
    assert memory is not None
    assert memory.supervisor_pid == os.getpid()
    poke(folder, 64, (1).to_bytes(8, "little"))
    memory = open_board(str(folder.path))
    assert memory is not None
    assert memory.supervisor_ticks == 1
