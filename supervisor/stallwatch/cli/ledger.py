"""The ledger of a daemon that has ended, read where it lies. Nothing is made or changed there."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from stallwatch.errors import StallwatchError, UnknownEngine
from stallwatch.evidence import database
from stallwatch.evidence.clean import clean

# what a list of stalls holds, as /v1/stalls does
KEYS = ("id", "engine", "incarnation", "kind", "detected_at", "action", "summary", "elapsed_s")
MAX_FILE = 64 * 1024 * 1024
_BUSY_S = 2.0
_ID = re.compile(r"st-\d{8}T\d{6}Z-[0-9a-f]{8}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")


class LedgerFile:
    """Reports under a state directory. StallwatchError when the ledger cannot be read."""

    def __init__(self, state_dir: str) -> None:
        self._files = Path(state_dir) / "stalls"
        self._path = Path(state_dir).absolute() / "stalls.db"
        self._rows("SELECT count(*) FROM stalls")

    def stalls(self, limit: int, engine: str | None = None) -> list[dict[str, Any]]:
        where, args = ("WHERE engine=?", (engine,)) if engine else ("", ())
        fields = ", ".join(f"json_extract(report, '$.{key}')" for key in KEYS)
        query = f"SELECT {fields}, culprit FROM stalls {where} ORDER BY seq DESC LIMIT ?"  # noqa: S608  # constants
        names = (*KEYS, "culprit")
        return [dict(zip(names, row, strict=True)) for row in self._rows(query, *args, limit)]

    def report(self, stall_id: str) -> dict[str, Any]:
        rows = self._rows("SELECT report FROM stalls WHERE id=?", stall_id)
        if not rows:
            raise UnknownEngine(
                f"no stall {stall_id!r} in the ledger", hint="`stallwatch stalls` lists them"
            )
        try:
            found = json.loads(rows[0][0])
        except (ValueError, TypeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise StallwatchError(f"the report {stall_id} in {self._path} is damaged")
        return found

    def files(self, stall_id: str) -> list[str]:
        if _ID.fullmatch(stall_id) is None:
            return []
        try:
            return sorted(n for n in os.listdir(self._files / stall_id) if _NAME.fullmatch(n))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise StallwatchError(f"{self._files / stall_id}: {exc.strerror}") from None

    def content(self, stall_id: str, name: str) -> bytes:
        path = self._files / stall_id / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise StallwatchError(f"{path} is no regular file")
                return file.read(MAX_FILE)
        except OSError as exc:
            raise StallwatchError(f"{path} cannot be read: {exc.strerror}") from None

    def _rows(self, query: str, *args: object) -> list[tuple[Any, ...]]:
        try:
            # opened here: sqlite3 would say no more than "unable to open database file"
            os.close(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            with _opened(self._path) as db:
                return db.execute(query, args).fetchall()
        except OSError as exc:
            raise StallwatchError(
                f"the ledger {self._path} cannot be read: {exc.strerror}",
                hint="read it as the user that ran the daemon",
            ) from None
        except (sqlite3.Error, database.Unusable) as exc:
            raise self._said(exc) from None

    def _said(self, exc: Exception) -> StallwatchError:
        code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StallwatchError(
                f"the ledger {self._path} is in use", hint="ask its daemon with --socket, or again"
            )
        return StallwatchError(
            f"the ledger {self._path} cannot be read: {clean(str(exc), 120)}",
            hint="a daemon that starts there moves it aside to broken-*",
        )


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, checked to be a ledger of ours."""
    wal, shm = Path(f"{path}-wal"), Path(f"{path}-shm")
    with ExitStack() as stack:
        if not wal.exists() or not wal.stat().st_size:
            # Closed well. mode=ro alone would make -wal and -shm for a database in WAL mode.
            uri = f"{path.as_uri()}?mode=ro&immutable=1"
        elif shm.exists():
            uri = f"{path.as_uri()}?mode=ro"
        else:
            # Pages of a crash without their index, which SQLite would make: in a copy.
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="stallwatch-"))
            for part in (path, wal):
                shutil.copyfile(part, Path(own) / part.name)
            uri = f"{(Path(own) / path.name).as_uri()}?mode=ro"
        db = stack.enter_context(closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)))
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if (application, version) != (database.APPLICATION_ID, database.VERSION):
            raise database.Unusable("it is no ledger of this version of stallwatch")
        yield db
