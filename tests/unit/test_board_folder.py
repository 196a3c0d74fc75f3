"""Making a board: private, whole, or a clear error now."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from heartbeat_helpers import folder_in
from stallwatch.board.create import BoardFolder
from stallwatch.errors import BoardError
from stallwatch.heartbeat import layout


def test_folder_and_file_are_private_and_allocated(tmp_path):
    """0700, 0600, every page there: no SIGBUS can come later."""
    with folder_in(tmp_path) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        found = folder.file.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_size == layout.total_size(8, 16)
        assert found.st_blocks * 512 >= found.st_size
        assert folder.environment() == {"STALLWATCH_BOARD": str(folder.path)}


def test_the_umask_does_not_widen_or_break_it(tmp_path):
    """A umask of 0 leaves the modes as they are."""
    old = os.umask(0)
    try:
        with folder_in(tmp_path) as folder:
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            assert stat.S_IMODE(folder.file.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_two_boards_of_one_incarnation_do_not_meet(tmp_path):
    """Names are unique even when an earlier folder was left behind."""
    with folder_in(tmp_path) as one, folder_in(tmp_path) as two:
        assert one.path != two.path


def test_remove_is_final_and_may_be_repeated(tmp_path):
    """remove() deletes everything and does not mind that it is gone."""
    folder = BoardFolder.create(tmp_path, engine="chat", incarnation=1, lanes=4, processes=2)
    (folder.path / layout.DUMPS / "1-2.txt").write_text("x")
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_parent_is_named(tmp_path):
    """The error names the folder and the user."""
    with pytest.raises(BoardError, match="gone") as caught:
        BoardFolder.create(tmp_path / "gone", engine="chat", incarnation=1)
    assert "uid" in caught.value.hint


def test_a_full_file_system_is_an_error_now(tmp_path, monkeypatch):
    """No room: a BoardError with the size that is missing, and nothing left behind."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BoardError, match=r"no room .* MiB") as caught:
        BoardFolder.create(tmp_path, engine="chat", incarnation=1)
    assert "shm-size" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
