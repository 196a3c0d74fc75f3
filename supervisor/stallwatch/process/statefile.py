"""What a killed supervisor leaves behind: one small file per engine, and how it is cleaned up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stallwatch import procfs
from stallwatch.errors import StateDirError
from stallwatch.heartbeat import layout
from stallwatch.process import maps
from stallwatch.process.kill import KillLimits, KillResult, kill
from stallwatch.process.maps import FileId
from stallwatch.process.members import Membership
from stallwatch.process.reaper import Owned, Reaper
from stallwatch.process.rundir import PREFIX, remove_folder

SUFFIX = ".tree.json"
LOCK = "lock"
_MAX_BYTES = 4 << 20


def boot_id() -> str:
    """Names this boot: pids and start ticks mean nothing in another one."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """One incarnation as the next daemon must know it."""

    engine: str
    incarnation: int
    boot_id: str
    session: int  # of the engine's root
    supervisor: tuple[int, int]  # pid, start ticks
    members: tuple[tuple[int, int], ...]  # everyone ever seen
    board: str = ""  # folder
    board_file: tuple[int, int] | None = None  # device, inode
    run_dirs: tuple[str, ...] = ()


def save(state_dir: str, record: TreeRecord) -> None:
    """Write it atomically, 0600. Raises StateDirError.

    No fsync: it must outlive us, not the machine, and after a crash of that the pids mean nothing.
    """
    write_json(os.path.join(state_dir, record.engine + SUFFIX), asdict(record))


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Replace a file of ours in one step, 0600. Raises StateDirError."""
    temporary = f"{path}.{os.getpid()}.new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(value, file, separators=(",", ":"))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise StateDirError(
            f"cannot write {path}: {error.strerror}",
            hint=remedy(error),
        ) from error


def remedy(error: OSError) -> str:
    """What an operator does about a state folder that refuses to be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space (or inodes) there, or set [supervisor] state_dir to another folder."
    if error.errno == errno.EROFS:
        return "It is mounted read-only: set [supervisor] state_dir to a folder on another disk."
    return "Give the daemon's user the right to write there, or set [supervisor] state_dir."


def read_json(path: str) -> dict[str, Any]:
    """What write_json wrote; {} when there is none or it is damaged."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def load(path: str) -> TreeRecord | None:
    """A record, or None when the file is missing, damaged or not one."""
    raw = read_json(path)
    try:
        board = raw.get("board_file")
        return TreeRecord(
            engine=str(raw["engine"]),
            incarnation=int(raw["incarnation"]),
            boot_id=str(raw["boot_id"]),
            session=int(raw["session"]),
            supervisor=_pair(raw["supervisor"]),
            members=tuple(_pair(item) for item in raw["members"]),
            board=str(raw.get("board", "")),
            board_file=_pair(board) if board else None,
            run_dirs=tuple(str(item) for item in raw.get("run_dirs", ())),
        )
    except (KeyError, TypeError, ValueError):
        return None


def forget(state_dir: str, engine: str) -> None:
    """The tree is gone and its folders are removed: nothing to find at the next start."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(state_dir, engine + SUFFIX))


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return int(first), int(second)


def _check_private(state_dir: str) -> None:
    """Whoever can write here can have any file of ours overwritten, and read every report."""
    found = os.stat(state_dir)
    if found.st_uid not in (os.geteuid(), 0):
        raise StateDirError(
            f"the state folder {state_dir} belongs to uid {found.st_uid}, not to us",
            hint="Set state_dir to a folder of the daemon's own user.",
        )
    if found.st_mode & 0o022:
        raise StateDirError(
            f"the state folder {state_dir} can be written by others (mode {found.st_mode & 0o777:o})",
            hint=f"chmod 700 {state_dir}, or set state_dir to a folder of its own.",
        )


class StateLock:
    """One daemon per state_dir. The lock ends with the process, however it ends."""

    def __init__(self, state_dir: str) -> None:
        """Take it. Raises StateDirError: not usable, or held by another daemon (named)."""
        path = os.path.join(state_dir, LOCK)
        try:
            os.makedirs(state_dir, mode=0o700, exist_ok=True)
            _check_private(state_dir)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StateDirError(
                f"cannot use the state folder {state_dir}: {error.strerror}",
                hint=remedy(error),
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            # A daemon that began on a full disk could not write its pid.
            known = holder.isdecimal()
            raise StateDirError(
                f"another stallwatch{f' (pid {holder})' if known else ''} uses the state folder "
                f"{state_dir}",
                hint=f"Stop it{f' (kill {holder})' if known else ''}, or give this one its own "
                "state_dir.",
            ) from error
        # Only for the words above: on a full disk the lock holds without it, and what else could
        # not be written is told by whoever writes it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class Leftover:
    """What was found of one engine of an earlier daemon."""

    engine: str
    incarnation: int
    supervisor: int
    found: int  # living processes
    result: KillResult

    def survivors(self) -> dict[int, int]:
        """What even SIGKILL did not end: pid -> start ticks."""
        ticks = {s.pid: procfs.start_ticks(s.pid) for s in self.result.survivors}
        return {pid: found for pid, found in ticks.items() if found is not None}

    def words(self) -> str:
        """One sentence for the log."""
        return (
            f"engine {self.engine} (incarnation {self.incarnation}) of the daemon with pid "
            f"{self.supervisor} had left {self.found} processes: {self.result.words()}"
        )


def end_leftovers(
    state_dir: str,
    *,
    reaper: Reaper,
    owned: Owned | None = None,
    limits: KillLimits = KillLimits(),  # noqa: B008 - immutable
    engine: str = "",
) -> tuple[Leftover, ...]:
    """End every tree that an earlier daemon of this state_dir left, and remove its folders.

    Hold the StateLock: without it this would end the trees of a daemon that lives. A tree that
    survives keeps its file, so that the next start tries again. `engine`: this one's tree only.
    """
    ended = []
    try:
        names = sorted(name for name in os.listdir(state_dir) if name.endswith(SUFFIX))
    except OSError:
        return ()
    for name in names:
        if engine and name != engine + SUFFIX:
            continue
        record = load(os.path.join(state_dir, name))
        if record is None:
            continue
        members = Membership(
            reaper=reaper,
            owned=owned,
            board=FileId(*record.board_file) if record.board_file else None,
            adopt_orphans=False,  # they came to init, or to whoever started us
        )
        try:
            left = _end(record, members, limits)
        finally:
            members.close()
        if left.result.gone:
            _remove_folders(record)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(state_dir, name))
        if left.found:
            ended.append(left)
    return tuple(ended)


def _end(record: TreeRecord, members: Membership, limits: KillLimits) -> Leftover:
    found = 0
    result = KillResult(gone=True)
    if record.boot_id == boot_id():
        for pid, ticks in record.members:
            members.add(pid, ticks)
        for pid, ticks in _same_session(record):
            members.add(pid, ticks)
        members.scan()
        found = len(members.members())
        result = kill(members, limits=limits) if found else result
    return Leftover(
        record.engine, record.incarnation, record.supervisor[0], found=found, result=result
    )


def _same_session(record: TreeRecord) -> list[tuple[int, int]]:
    """Processes in the old root's session, unless that number means another session by now.

    A number is free for a stranger's session once nobody is in the old one. So an unknown process
    counts only beside a known one, or if it was started with the old board in its environment.
    """
    known = dict(record.members)
    ticks = known.get(record.session)
    leader = procfs.stat(record.session)
    if record.session <= 1 or ticks is None or (leader and leader.start_ticks != ticks):
        return []
    stats = (procfs.stat(pid) for pid in procfs.pids())
    there = [
        s
        for s in stats
        if s and s.session == record.session and s.start_ticks >= ticks and s.pid != os.getpid()
    ]
    same = any(known.get(s.pid) == s.start_ticks for s in there)
    mark = f"{layout.ENV}={record.board}".encode()
    return [(s.pid, s.start_ticks) for s in there if same or mark in _environment(s.pid)]


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read(_MAX_BYTES).split(b"\0")
    except OSError:
        return []


def _remove_folders(record: TreeRecord) -> None:
    # The file says what to remove, and files can be wrong: only what looks like ours goes.
    ours = os.path.basename(record.board).startswith(f"stallwatch-{record.engine}-")
    if ours or os.path.dirname(record.board) == maps.SHM:  # [supervisor] shm may be elsewhere
        remove_folder(record.board)
    for path in record.run_dirs:
        if os.path.basename(path).startswith(PREFIX):
            remove_folder(path)
