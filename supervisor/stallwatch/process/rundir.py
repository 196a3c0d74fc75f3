"""A private, short folder per incarnation, so that what an engine drops is removed with it.

vLLM leaves 7-8 sockets and a vllm_dist_ folder in /tmp at every start that ends by SIGKILL.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from stallwatch.errors import StateDirError

PREFIX = "sw-"
# AF_UNIX paths end at 107 bytes; vLLM adds "/" and a uuid of 36.
_RPC_MAX = 107 - 37


@dataclass(frozen=True, slots=True)
class RunDir:
    """`path` is TMPDIR of the engine; `rpc` holds its sockets, inside `path` unless that is long."""

    path: str
    rpc: str

    @classmethod
    def create(cls, name: str, incarnation: int, *, env: Mapping[str, str] = os.environ) -> RunDir:
        """Make it, 0700, under the user's TMPDIR. Raises StateDirError."""
        base = env.get("TMPDIR") or "/tmp"  # noqa: S108 - what TMPDIR means when unset
        try:
            path = tempfile.mkdtemp(prefix=f"{PREFIX}{name[:16]}-{incarnation}-", dir=base)
            rpc = os.path.join(path, "r")
            if len(os.fsencode(rpc)) > _RPC_MAX:
                rpc = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
            else:
                os.mkdir(rpc, 0o700)
        except OSError as error:
            raise StateDirError(
                f"no temporary folder for the engine in {base}: {error.strerror}",
                hint="Set TMPDIR to a folder that exists, can be written and has room.",
            ) from error
        return cls(path, rpc)

    def paths(self) -> tuple[str, ...]:
        """The folders to remove: what a state file keeps."""
        return (self.path,) if self.rpc.startswith(self.path + "/") else (self.path, self.rpc)

    def environment(self, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What the engine's environment gets on top. Compile caches stay where they were."""
        return {
            "TMPDIR": self.path,
            "VLLM_RPC_BASE_PATH": self.rpc,
            "TORCHINDUCTOR_CACHE_DIR": inductor_cache(env),
        }

    def remove(self) -> bool:
        """Remove all of it; False when something is left."""
        removed = [remove_folder(path) for path in self.paths()]  # all, also after a failure
        return all(removed)


def inductor_cache(env: Mapping[str, str] = os.environ) -> str:
    """Where torch would keep compiled kernels if TMPDIR had not been changed."""
    given = env.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        return given
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # no passwd entry: torch then uses the uid
        user = f"uid_{os.getuid()}"
    base = env.get("TMPDIR") or "/tmp"  # noqa: S108 - what torch does
    return os.path.join(base, f"torchinductor_{user}")


def remove_folder(path: str) -> bool:
    """Remove a folder of ours and all in it, symlinks never followed; True when it is gone."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
