"""Was it the out-of-memory killer? The cgroup of the engine counts its victims."""

from __future__ import annotations

import os
from pathlib import Path

from stallwatch import procfs

CGROUPS = Path("/sys/fs/cgroup")


class OomCounter:
    """oom_kill of one cgroup: memory.events (v2) or memory.oom_control (v1)."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._last = self.read()

    @classmethod
    def of(cls, pid: int, *, proc: Path = procfs.PROC, root: Path = CGROUPS) -> OomCounter:
        """The counter of the cgroup that the process is in; one that never grows if there is none."""
        return cls(_find(pid, proc, root))

    def read(self) -> int | None:
        """Victims so far; None when the kernel does not say."""
        if self._file is None:
            return None
        try:
            text = self._file.read_text()
        except OSError:
            return None
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
        return None

    def grew(self) -> bool:
        """True when there were victims since the last question."""
        now = self.read()
        before, self._last = self._last, now
        return now is not None and before is not None and now > before


def _find(pid: int, proc: Path, root: Path) -> Path | None:
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found = _first(root, path, "memory.events")
        elif "memory" in controllers.split(","):
            found = _first(root / "memory", path, "memory.oom_control")
        else:
            continue
        if found:
            return found
    return None


def _first(base: Path, path: str, name: str) -> Path | None:
    # Inside a container the path is the host's, but the mount's root is our own cgroup.
    for folder in (os.path.join(base, path.lstrip("/")), base):
        file = Path(folder) / name
        if file.is_file():
            return file
    return None
