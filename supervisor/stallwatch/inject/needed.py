"""Whether an engine runs in another environment than the supervisor. When unsure: yes.

Injecting where it is not needed costs a few copied files; not injecting where it is needed means an
engine without lanes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

SHEBANG_MAX = 512  # bytes; the kernel itself stops at 256


def needed(command: Sequence[str], *, environ: Mapping[str, str] | None = None) -> bool:
    """True unless the command's Python interpreter is certainly the environment of this process."""
    known = os.environ if environ is None else environ
    if not command:
        return True
    program = shutil.which(command[0], path=known.get("PATH"))
    if program is None:
        return True
    interpreter = _interpreter(program, known)
    return interpreter is None or not _ours(interpreter)


def _interpreter(program: str, environ: Mapping[str, str]) -> str | None:
    """The Python that runs `program`: itself, or the one of its first line; None: cannot tell."""
    if os.path.basename(program).startswith("python"):
        return program
    try:
        with open(program, "rb") as file:
            line = file.readline(SHEBANG_MAX)
    except OSError:
        return None
    if not line.startswith(b"#!"):
        return None
    words = os.fsdecode(line[2:]).split()
    if not words:
        return None
    if os.path.basename(words[0]) == "env":
        # `env -S python -X ...` and variables are not worth guessing at.
        if len(words) != 2:
            return None
        found = shutil.which(words[1], path=environ.get("PATH"))
        return found if found and os.path.basename(found).startswith("python") else None
    return words[0] if os.path.basename(words[0]).startswith("python") else None


def _ours(interpreter: str) -> bool:
    """Whether this interpreter belongs to our environment.

    The folder counts, not the resolved file: every virtual environment links to the same python.
    """
    return os.path.realpath(os.path.dirname(interpreter)) == os.path.realpath(
        os.path.dirname(sys.executable)
    )
