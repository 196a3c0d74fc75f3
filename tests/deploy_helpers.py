"""What the deployment tests share: where the files lie, unit files as tables, a service manager's socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs"
BIN = Path(sys.executable).parent
NOBODY = 65534
FILTERED = str(Path(__file__).with_name("deploy_seccomp.py"))
NO_RIGHTS = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
]


def tool(name: str, package: str) -> str:
    """The program's path, from this environment or the system; skips with the package to install."""
    found = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed: {package}")
    return found


def unit(path: Path) -> dict[str, list[str]]:
    """A unit file as 'Section.Key' -> values, in order; an empty value resets, as in systemd."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            values = found.setdefault(f"{section}.{key}", [])
            if value:
                values.append(value)
            else:
                values.clear()
    return found


class Manager:
    """The receiving end of sd_notify: what a service manager hears, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(0.2)
        self.heard: list[str] = []

    def read(self) -> None:
        """At most one more message."""
        with contextlib.suppress(TimeoutError):
            self.heard.extend(self.socket.recv(4096).decode().splitlines())

    def mark(self) -> int:
        """Everything sent until now is read; the place where what follows begins."""
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.heard.extend(self.socket.recv(4096).decode().splitlines())
        self.socket.settimeout(0.2)
        return len(self.heard)

    def wait(
        self, word: str, *, since: int = 0, count: int = 1, seconds: float = 20.0
    ) -> list[str]:
        """What was heard since the mark, up to the `count`-th line that begins with the word."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            places = [i for i, x in enumerate(self.heard) if i >= since and x.startswith(word)]
            if len(places) >= count:
                return self.heard[since : places[count - 1] + 1]
            self.read()
        raise AssertionError(f"no {word} within {seconds:g} s; heard {self.heard[since:]}")


@contextlib.contextmanager
def manager(path: Path) -> Iterator[Manager]:
    """A notify socket for one test."""
    found = Manager(path)
    try:
        yield found
    finally:
        found.socket.close()


def own(folder: Path, uid: int = NOBODY) -> None:
    """Give the folder to that user, if we may; else it is ours already."""
    if os.geteuid() != 0:
        return
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, uid, uid)


def without_rights(folder: Path) -> Sequence[str]:
    """The words before a command that take every capability and root away.

    Where the interpreter lies below a folder of root's own (0700), a mount namespace shows it to
    everybody: the folder is covered and only what is needed is put back.
    """
    if os.geteuid() != 0:
        return ["setpriv", "--no-new-privs"]
    lines = opened(folder / "hold")
    if not lines:
        return NO_RIGHTS
    script = "\n".join(["set -e", *lines, 'exec "$@"'])
    return ["unshare", "--mount", "sh", "-c", script, "sh", *NO_RIGHTS]


def opened(hold: Path) -> list[str]:
    """Lines of a shell, for a mount namespace of its own: the interpreter is within everybody's reach."""
    needed = {Path(p).resolve() for p in (sys.base_prefix, sys.prefix, ROOT)}
    behind = {path: door for path in needed if (door := _closed(path)) is not None}
    lines = []
    for number, path in enumerate(behind):
        lines += [f"mkdir -p {hold}/{number}", f"mount --bind {path} {hold}/{number}"]
    lines += [f"mount -t tmpfs -o mode=755 none {door}" for door in sorted(set(behind.values()))]
    for number, path in enumerate(behind):
        lines += [f"mkdir -p {path}", f"mount --move {hold}/{number} {path}"]
    return lines


def _closed(path: Path) -> Path | None:
    """The outermost folder on the way that others may not pass."""
    way = [*reversed(path.parents)]
    return next((p for p in way if not p.stat().st_mode & stat.S_IXOTH), None)
