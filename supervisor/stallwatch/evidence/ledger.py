"""Every stall kept: SQLite for the reports, a folder of files per stall, both bounded.

Evidence must never stop the supervisor: a broken database is moved aside, a full disk keeps the
report in memory, and both are said in `problems`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallwatch.clock import Clock, SystemClock
from stallwatch.errors import StateDirError
from stallwatch.evidence import database
from stallwatch.evidence.clean import clean

MIB = 1 << 20
Rows = list[tuple[Any, ...]]  # named here: inside the class, `list` is the method
_ID = re.compile(r"st-\d{8}T\d{6}Z-[0-9a-f]{8}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_SUMMARY = ("id", "engine", "incarnation", "kind", "detected_at", "action", "summary", "elapsed_s")
_BROKEN_KEPT = 3


@dataclass(frozen=True, slots=True)
class _Kept:
    """A report that the disk did not take. `stored`: an older version of it is on disk."""

    report: dict[str, Any]
    at: float
    stored: bool


class Ledger:
    """Reports and artefacts under `state_dir`. Safe from any thread; one writer at a time.

    Raises StateDirError when the folder cannot be made or written. Later trouble with the disk or
    the database raises nothing: see `problems` (the latest sentences, oldest first).
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        max_items: int = 64,
        max_bytes: int = 256 * MIB,
        clock: Clock | None = None,
    ) -> None:
        self._dir = Path(state_dir)
        self._files = self._dir / "stalls"
        self._path = self._dir / "stalls.db"
        self._max_items, self._max_bytes = max(1, max_items), max_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._ring: deque[_Kept] = deque(maxlen=16)  # what the disk did not take
        self._issued: deque[str] = deque(maxlen=1024)
        self.problems: deque[str] = deque(maxlen=32)
        self.memory_only = ""  # why new reports stay in memory; '' when the disk takes them
        self._make_folders()
        self._closed = False
        self._db: sqlite3.Connection | None = self._open()
        self._sweep_orphans()

    # -- writing -----------------------------------------------------------------------------

    def new_id(self, wall: float) -> str:
        """An id that no stall in this ledger has, nor any that was given out before."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall))
        # An id is needed before the clients are told: a disk that hangs must not hold it up.
        if not self._lock.acquire(timeout=0.2):
            return f"st-{stamp}-{secrets.token_hex(4)}"
        try:
            while True:
                new = f"st-{stamp}-{secrets.token_hex(4)}"
                if new not in self._issued and not self._rows(
                    "SELECT 1 FROM stalls WHERE id=?", new
                ):
                    self._issued.append(new)
                    return new
        finally:
            self._lock.release()

    def insert(self, report: Mapping[str, Any]) -> str:
        """Keep a report. Returns '' when it is on disk, else the sentence that says why not."""
        return self._write(dict(report))

    def update(self, stall_id: str, report: Mapping[str, Any]) -> str:
        """Replace a report by its final refinement (same id). Returns as `insert` does."""
        return self._write({**report, "id": stall_id})

    def artefact(self, stall_id: str, name: str, data: bytes) -> Path | None:
        """Keep one file of a stall (0600); None when the disk refuses. Bad names: ValueError."""
        if _ID.fullmatch(stall_id) is None or _NAME.fullmatch(name) is None:
            raise ValueError(f"not an artefact name: {stall_id!r} {name!r}")
        folder = self._files / stall_id
        path, part = folder / name, folder / f".{name}.part"
        with self._lock:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(part, flags, 0o600), "wb") as file:
                    file.write(data)
                part.replace(path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    part.unlink()
                self._say(f"artefact {name} of {stall_id} was not kept: {error.strerror}")
                return None
            self._change("UPDATE stalls SET files=? WHERE id=?", _size(folder), stall_id)
            self._retain()
        return path

    # -- reading -----------------------------------------------------------------------------

    def get(self, stall_id: str) -> dict[str, Any] | None:
        """The whole report, or None."""
        with self._lock:
            for kept in self._ring:
                if kept.report["id"] == stall_id:
                    return dict(kept.report)
            rows = self._rows("SELECT report FROM stalls WHERE id=?", stall_id)
        return _loads(rows[0][0]) if rows else None

    def list(self, limit: int = 100, engine: str | None = None) -> Sequence[dict[str, Any]]:
        """Whole reports, newest first."""
        limit = max(0, limit)
        where, args = ("WHERE engine=?", (engine,)) if engine else ("", ())
        query = f"SELECT report FROM stalls {where} ORDER BY seq DESC LIMIT ?"  # noqa: S608  # two constants
        with self._lock:
            kept = [k.report for k in reversed(self._ring)]
            rows = self._rows(query, *args, limit)
        ring = [dict(r) for r in kept if not engine or r.get("engine") == engine]
        known = {r["id"] for r in ring}
        stored = [r for row in rows if (r := _loads(row[0])) is not None and r["id"] not in known]
        return (ring + stored)[:limit]

    def summaries(
        self, limit: int = 100, engine: str | None = None, *, offset: int = 0
    ) -> Sequence[dict[str, Any]]:
        """The keys of a list of stalls (_SUMMARY), newest first, without reading whole reports.

        `offset` of the newest are left out.
        """
        limit, offset = max(0, limit), max(0, offset)
        where, args = ("WHERE engine=?", (engine,)) if engine else ("", ())
        fields = ", ".join(f"json_extract(report, '$.{key}')" for key in _SUMMARY)
        query = f"SELECT {fields}, culprit FROM stalls {where} ORDER BY seq DESC LIMIT ? OFFSET ?"  # noqa: S608  # constants
        with self._lock:
            kept = [k.report for k in reversed(self._ring)]
            # what the ring holds stands before every row, or in place of one
            skipped = max(0, offset - len(kept))
            rows = self._rows(query, *args, limit + offset - skipped, skipped)
        found = [
            {**{key: r.get(key) for key in _SUMMARY}, "culprit": _identity(r)[2]}
            for r in kept
            if not engine or r.get("engine") == engine
        ]
        known = {each["id"] for each in found}
        names = (*_SUMMARY, "culprit")
        found += [dict(zip(names, row, strict=True)) for row in rows if row[0] not in known]
        return found[offset - skipped :][:limit]

    def artefacts(self, stall_id: str) -> tuple[Path, ...]:
        """The files kept for one stall, by name."""
        if _ID.fullmatch(stall_id) is None:
            return ()
        with contextlib.suppress(OSError):
            found = sorted((self._files / stall_id).iterdir())
            return tuple(path for path in found if _NAME.fullmatch(path.name))
        return ()

    def count_recent(self, engine: str, kind: str, culprit: str, seconds_: float) -> int:
        """How many stalls of that engine, kind and culprit were kept in the last seconds."""
        since = self._clock.wall() - seconds_
        query = "SELECT count(*) FROM stalls WHERE engine=? AND kind=? AND culprit=? AND at>=?"
        with self._lock:
            rows = self._rows(query, engine, kind, culprit, since)
            kept = [_identity(k.report) for k in self._ring if k.at >= since and not k.stored]
        return (rows[0][0] if rows else 0) + kept.count((engine, kind, culprit))

    def close(self) -> tuple[str, ...]:
        """Close the database; what the ring still holds is tried once more.

        The ids of the reports that the disk did not take whole: the rest ends with this process.
        """
        with self._lock:
            self._flush()
            self._closed = True
            if self._db is not None:
                self._db.close()
                self._db = None
            return tuple(kept.report["id"] for kept in self._ring)

    # -- inside the lock ---------------------------------------------------------------------

    def _write(self, report: dict[str, Any]) -> str:
        if _ID.fullmatch(str(report.get("id", ""))) is None:
            raise ValueError(f"not a stall id: {report.get('id')!r}")
        with self._lock:
            at = self._clock.wall()
            ring = [kept for kept in self._ring if kept.report["id"] != report["id"]]
            self._ring.clear()
            self._ring.extend(ring)
            self._reopen()
            self._flush()
            self.memory_only = why = self._store(report, at)
            if why == "":
                self._retain()
                return ""
            stored = bool(self._rows("SELECT 1 FROM stalls WHERE id=?", report["id"]))
            self._ring.append(_Kept(report, at, stored))
            return self._say(f"report {report['id']} is kept in memory only: {why}")

    def _store(self, report: Mapping[str, Any], at: float) -> str:
        """'' or why the database refused."""
        text = json.dumps(report, separators=(",", ":"), default=str)
        engine, kind, culprit = _identity(report)
        row = (report["id"], engine, kind, culprit, at, len(text), text)
        return self._change(
            "INSERT INTO stalls (id, engine, kind, culprit, at, bytes, report)"
            " VALUES (?,?,?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET kind=excluded.kind,"
            " culprit=excluded.culprit, bytes=excluded.bytes, report=excluded.report",
            *row,
        )

    def _flush(self) -> None:
        """Try again what the disk did not take, oldest first; stop at the first refusal."""
        while self._ring and self._store(self._ring[0].report, self._ring[0].at) == "":
            self._ring.popleft()

    def _retain(self) -> None:
        """Drop the oldest stalls beyond the caps, their files first. The newest always stays."""
        rows = self._rows("SELECT id, bytes+files FROM stalls ORDER BY seq DESC")
        total = 0
        for kept, (stall_id, size) in enumerate(rows, 1):
            total += size
            if kept > 1 and (kept > self._max_items or total > self._max_bytes):
                shutil.rmtree(self._files / stall_id, ignore_errors=True)
                self._change("DELETE FROM stalls WHERE id=?", stall_id)
        if len(rows) > self._max_items or total > self._max_bytes:
            self._change("PRAGMA incremental_vacuum")

    def _rows(self, query: str, *args: object) -> Rows:
        if self._db is None:
            return []
        try:
            return self._db.execute(query, args).fetchall()
        except sqlite3.Error as error:
            self._say(f"the ledger cannot be read: {clean(str(error), 120)}")
            return []

    def _change(self, query: str, *args: object) -> str:
        """Run one statement; '' or why the database refused it."""
        if self._db is None:
            return "the ledger's database cannot be opened"
        try:
            self._db.execute(query, args).fetchall()
        except (sqlite3.Error, UnicodeEncodeError) as error:
            if database.is_broken(error):
                self._db.close()
                self._db = None
                self._move_aside(str(error))
            return clean(str(error), 120)
        return ""

    def _reopen(self) -> None:
        """Come back from a full disk, a broken file, or a folder that somebody removed."""
        if self._closed or (self._db is not None and self._path.exists()):
            return
        if self._db is not None:
            self._db.close()
            self._say(f"the ledger {self._path} was removed: a new one begins")
        with contextlib.suppress(OSError):
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = self._open()

    def _say(self, sentence: str) -> str:
        self.problems.append(sentence)
        return sentence

    # -- opening -----------------------------------------------------------------------------

    def _make_folders(self) -> None:
        try:
            self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.mkdir(mode=0o700, exist_ok=True)
            probe = self._files / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
            probe.mkdir(mode=0o700)  # os.access is no answer on read-only mounts and for root
            probe.rmdir()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._files.is_dir():
                self.memory_only = f"state_dir {self._dir} is full"
                self._say(f"{self.memory_only}: reports stay in memory")
                return
            raise StateDirError(
                f"state_dir {self._dir} cannot be written: {error.strerror}",
                hint="Set [supervisor] state_dir (or --state-dir) to a folder that this user may write.",
            ) from error

    def _open(self) -> sqlite3.Connection | None:
        for last in (False, True):
            try:
                return database.connect(self._path)
            except (sqlite3.Error, OSError, database.Unusable) as error:
                if last or not database.is_broken(error):
                    why = clean(str(error), 120)
                    self.memory_only = f"the ledger {self._path} cannot be opened: {why}"
                    self._say(f"the ledger {self._path} cannot be opened ({why})")
                    return None
                self._move_aside(str(error))
        return None

    def _move_aside(self, why: str) -> None:
        """The whole ledger into its own folder; the files of its stalls go with it."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._clock.wall()))
        aside = self._dir / f"broken-{stamp}-{secrets.token_hex(2)}"
        with contextlib.suppress(OSError):
            aside.mkdir(mode=0o700)
            for name in ("stalls.db", "stalls.db-wal", "stalls.db-shm", "stalls"):
                with contextlib.suppress(FileNotFoundError):
                    (self._dir / name).rename(aside / name)
            self._files.mkdir(mode=0o700, exist_ok=True)
            for old in sorted(self._dir.glob("broken-*"))[:-_BROKEN_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        self._say(
            f"the ledger was unusable ({clean(why, 120)}): moved to {aside}, a new one begins"
        )

    def _sweep_orphans(self) -> None:
        """Files of stalls that the database does not know (it was replaced, or we were killed)."""
        if self._db is None:
            return
        known = {row[0] for row in self._rows("SELECT id FROM stalls")}
        with contextlib.suppress(OSError):
            for folder in self._files.iterdir():
                if _ID.fullmatch(folder.name) and folder.name not in known:
                    shutil.rmtree(folder, ignore_errors=True)


def _identity(report: Mapping[str, Any]) -> tuple[str, str, str]:
    """(engine, kind, culprit address): two stalls that agree in it are a repetition."""
    culprit = report.get("culprit")
    who = culprit if isinstance(culprit, Mapping) else {}
    address = str(who.get("lane") or who.get("process") or "")
    return str(report.get("engine", "")), str(report.get("kind", "")), address


def _loads(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0
