"""The ledger's SQLite file: its schema, how it is opened, and when it is beyond use."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from stallwatch.evidence.clean import clean

VERSION = 1
APPLICATION_ID = 0x5374616C  # "Stal"
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_SCHEMA = """
CREATE TABLE stalls (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  engine TEXT NOT NULL,
  kind TEXT NOT NULL,
  culprit TEXT NOT NULL,
  at REAL NOT NULL,
  bytes INTEGER NOT NULL,
  files INTEGER NOT NULL DEFAULT 0,
  report TEXT NOT NULL
);
CREATE INDEX stalls_repeat ON stalls (engine, kind, culprit, at);
"""


class Unusable(Exception):
    """The file cannot serve as our ledger: not ours, from a newer version, or damaged."""


def connect(path: Path) -> sqlite3.Connection:
    """Open or make the ledger's database. Raises sqlite3.Error, OSError, Unusable."""
    # Made by us first: SQLite would create it with the umask, and gives -wal and -shm its mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    db = sqlite3.connect(path, timeout=2.0, check_same_thread=False, isolation_level=None)
    try:
        _prepare(db)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and (application != APPLICATION_ID or version != VERSION):
        raise Unusable(f"application {application:#x}, version {version}, expected {VERSION}")
    if not tables:
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA journal_size_limit=4194304")
    if not tables:
        db.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA application_id={APPLICATION_ID};"
            f" PRAGMA user_version={VERSION}; COMMIT;"
        )
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise Unusable(clean(str(verdict), 120))


def is_broken(error: Exception) -> bool:
    """True when only a new file helps; False when the disk or the rights are at fault."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, Unusable) or code in _BROKEN
