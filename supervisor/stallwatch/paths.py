"""Where things live by default. Daemon and CLI share these, so that they meet without flags."""

from __future__ import annotations

import os
from collections.abc import Mapping

SOCKET_NAME = "control.sock"
DEFAULT_CONTROL = "127.0.0.1:9470"


def state_dir(env: Mapping[str, str] = os.environ) -> str:
    """The default state directory: systemd's if it gave one, else XDG's."""
    given = env.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return given
    home = env.get("HOME") or os.path.expanduser("~")
    return os.path.join(env.get("XDG_STATE_HOME") or f"{home}/.local/state", "stallwatch")


def runtime_socket(env: Mapping[str, str] = os.environ) -> str | None:
    """The socket in the user's runtime directory, if that directory exists."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if not runtime or not os.path.isdir(runtime):
        return None
    return os.path.join(runtime, "stallwatch", SOCKET_NAME)


def listen_socket(state: str | None = None, env: Mapping[str, str] = os.environ) -> str:
    """Where a daemon listens: the variable, else inside an explicit state_dir, else the default.

    A daemon with a state_dir of its own keeps its socket there, so that two daemons of one user do
    not fight over one name; the client then needs --socket or STALLWATCH_SOCKET.
    """
    if env.get("STALLWATCH_SOCKET"):
        return env["STALLWATCH_SOCKET"]
    if state and os.path.abspath(state) != os.path.abspath(state_dir(env)):
        return os.path.join(state, SOCKET_NAME)
    return runtime_socket(env) or os.path.join(state_dir(env), SOCKET_NAME)


def client_sockets(env: Mapping[str, str] = os.environ) -> list[str]:
    """Where a client looks, in order. A variable that is set is the only answer."""
    if env.get("STALLWATCH_SOCKET"):
        return [env["STALLWATCH_SOCKET"]]
    found = [
        runtime_socket(env),
        os.path.join(state_dir(env), SOCKET_NAME),
        f"/run/stallwatch/{SOCKET_NAME}",
    ]
    return [path for path in found if path]
