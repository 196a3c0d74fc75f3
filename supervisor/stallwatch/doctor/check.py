"""One check: what was found, and what to do about it. Each has a deadline; none can hang the rest."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

DEADLINE_S = 12.0


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Result:
    """`remedy` names the next thing to do; empty when nothing is to be done."""

    name: str
    level: Level
    message: str
    remedy: str = ""


def ok(name: str, message: str) -> Result:
    return Result(name, Level.OK, message)


def warn(name: str, message: str, remedy: str) -> Result:
    return Result(name, Level.WARN, message, remedy)


def fail(name: str, message: str, remedy: str) -> Result:
    return Result(name, Level.FAIL, message, remedy)


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished child. code None: it did not end in time and was killed."""

    code: int | None
    out: str
    err: str


def run(argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> Ran | None:
    """Run a child to its end or its deadline; None when it cannot be started."""
    try:
        with subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            start_new_session=True,
        ) as child:
            try:
                out, err = child.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                # its whole session: a tool's own child may hold the pipe open
                os.killpg(child.pid, 9)
                child.communicate()
                return Ran(None, "", "")
    except OSError:
        return None
    return Ran(child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


Check = Callable[[], Result]


def run_all(checks: Mapping[str, Check], deadline_s: float = DEADLINE_S) -> list[Result]:
    """All checks at once, in the order given. A check that raises or hangs is a failed check."""
    found: dict[str, Result] = {}

    def one(name: str, check: Check) -> None:
        try:
            found[name] = check()
        except Exception as exc:
            words = f"the check itself failed: {type(exc).__name__}: {exc}"
            found[name] = fail(name, words, "please report this")

    threads = [
        threading.Thread(target=one, args=item, name=f"doctor-{item[0]}", daemon=True)
        for item in checks.items()
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = f"no answer within {deadline_s:g} s"
    remedy = "something on this machine hangs: look for processes in state D"
    return [found.get(name) or fail(name, late, remedy) for name in checks]
