"""Where reports come from: the daemon, or its ledger when no daemon answers any more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from stallwatch import paths
from stallwatch.cli.client import Client, client, segment
from stallwatch.cli.output import say
from stallwatch.cli.settings import Settings, from_environment, settings
from stallwatch.errors import DaemonUnreachable

if TYPE_CHECKING:
    from stallwatch.cli.ledger import LedgerFile

DATABASE = "stalls.db"


class Reports(Protocol):
    """The stalls that are kept, newest first. Unknown ids raise UnknownEngine."""

    def stalls(self, limit: int, engine: str | None = None) -> list[dict[str, Any]]: ...
    def report(self, stall_id: str) -> dict[str, Any]: ...
    def files(self, stall_id: str) -> list[str]: ...
    def content(self, stall_id: str, name: str) -> bytes: ...


class Asked:
    """Reports as a daemon tells them."""

    def __init__(self, daemon: Client) -> None:
        self._daemon = daemon

    def stalls(self, limit: int, engine: str | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._daemon.get("/v1/stalls", engine=engine, limit=limit)[
            "items"
        ]
        return found

    def report(self, stall_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._daemon.get(f"/v1/stalls/{segment(stall_id)}")
        return found

    def files(self, stall_id: str) -> list[str]:
        listed = self._daemon.get(f"/v1/stalls/{segment(stall_id)}/artefacts")["items"]
        return [str(name) for name in listed]

    def content(self, stall_id: str, name: str) -> bytes:
        path = f"/v1/stalls/{segment(stall_id)}/artefacts/{segment(name)}"
        return self._daemon.raw("GET", path)


def reports() -> Reports:
    """The daemon's, if one answers; else those of its state directory.

    Raises DaemonUnreachable when there is neither.
    """
    found = settings()
    folder = _aim(found)
    daemon = client()
    try:
        daemon.get("/v1/stalls", limit=1)
    except DaemonUnreachable as exc:
        return _kept(folder, exc)
    return Asked(daemon)


def _aim(found: Settings) -> str | None:
    """The state directory that belongs to the daemon that is asked; None when nobody can tell.

    Another daemon's reports would be a wrong answer: a --state-dir asks the daemon of that folder,
    and an address that was given is not replaced by the default folder.
    """
    env = from_environment()
    given = (found.url, found.socket) != (env.url, env.socket)
    if found.state_dir:
        if not given:
            socket = os.path.join(found.state_dir, paths.SOCKET_NAME)
            default = os.path.abspath(found.state_dir) == os.path.abspath(paths.state_dir())
            found.url, found.socket = ("", "") if default else ("", socket)
        return found.state_dir
    if found.url:
        return None
    if found.socket:
        beside = os.path.dirname(os.path.abspath(found.socket))
        return beside if os.path.lexists(os.path.join(beside, DATABASE)) else None
    return paths.state_dir()


def _kept(folder: str | None, exc: DaemonUnreachable) -> LedgerFile:
    if folder is None:
        raise DaemonUnreachable(
            exc.message, hint="--state-dir DIR reads the reports of a daemon that has ended"
        ) from None
    path = os.path.join(folder, DATABASE)
    if not os.path.lexists(path):
        raise DaemonUnreachable(
            f"{exc.message}\n  and {folder} holds no ledger",
            hint="start one with `stallwatch serve -- COMMAND`, or name its folder with --state-dir",
        ) from None
    from stallwatch.cli.ledger import LedgerFile

    kept = LedgerFile(folder)
    say(f"no daemon answers; read from {folder}")
    return kept
