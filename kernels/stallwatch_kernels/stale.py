"""Machine code of an older source must not run.

numba compares a cached function with the file that defines it, and not with the files of the helpers that
were compiled into it: an edited helper would be ignored for ever. So a stamp over
all sources lies beside the cache, and a cache with another stamp is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent
_STAMP = "sources.stamp"


def drop_stale_code(package: Path = PACKAGE, elsewhere: str | None = None) -> bool:
    """Remove numba's files of `package` when its sources changed; True if they had. Never raises.

    They lie in the package, or in `elsewhere` (NUMBA_CACHE_DIR). Where nothing can be written there is no cache.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR", "") if elsewhere is None else elsewhere
    home = Path(chosen) / _folder_of(package) if chosen else package / "__pycache__"
    stamp = home / _STAMP
    digest = _digest(package)
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return False
        for cached in _cached(package, chosen):
            with contextlib.suppress(OSError):
                cached.unlink()
        home.mkdir(parents=True, exist_ok=True)
        part = stamp.with_name(f"{_STAMP}.{os.getpid()}")
        part.write_text(digest)
        part.replace(stamp)
    except OSError:
        return False
    return True


def _cached(package: Path, chosen: str) -> Iterator[Path]:
    """Index and code files of every module of the package."""
    if not chosen:
        yield from package.rglob("*.nb[ic]")
        return
    for folder in {source.parent for source in package.rglob("*.py")}:
        yield from (Path(chosen) / _folder_of(folder)).glob("*.nb[ic]")


def _folder_of(sources: Path) -> str:
    """How numba names a folder of sources below NUMBA_CACHE_DIR."""
    path = os.path.abspath(sources)
    return f"{sources.name}_{hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest()}"


def _digest(package: Path) -> str:
    """Of every source by path and content."""
    found = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        with contextlib.suppress(OSError):
            found.update(f"{source.relative_to(package)}\0".encode())
            found.update(source.read_bytes())
    return found.hexdigest()
