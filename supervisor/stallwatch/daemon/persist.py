"""What outlives the daemon for each engine: its restart budget, its incarnation number."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stallwatch.clock import Clock
from stallwatch.lifecycle.budget import Budget

_MAX = 1 << 20


def boot_id(proc: Path = Path("/proc")) -> str:
    """The id of the running boot; '' where the kernel does not say."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class EngineMemory:
    """One small JSON file per engine under state_dir/engines. Trouble is told, never raised."""

    def __init__(
        self, state_dir: Path, name: str, clock: Clock, problem: Callable[[str], None]
    ) -> None:
        self._path = state_dir / "engines" / f"{name}.json"
        self._clock = clock
        self._problem = problem
        self._boot = boot_id()
        self._told = False

    def load(self, budget: Budget) -> tuple[Budget, int]:
        """The budget with what was spent before, and the last incarnation's number."""
        try:
            raw = self._path.read_bytes()[:_MAX]
            saved: Any = json.loads(raw)
        except FileNotFoundError:
            return budget, 0
        except (OSError, ValueError) as error:
            self._problem(f"{self._path} cannot be read ({error}): the restart budget begins anew")
            return budget, 0
        if not isinstance(saved, dict):
            return budget, 0
        number, spent = saved.get("incarnation"), saved.get("budget")
        restored = budget.restored(
            spent if isinstance(spent, dict) else {},
            now_ns=self._clock.monotonic_ns(),
            wall=self._clock.wall(),
            boot_id=self._boot,
        )
        return restored, number if isinstance(number, int) and 0 <= number < 1 << 31 else 0

    def save(self, budget: Budget, incarnation: int) -> None:
        """Write by rename, so that a killed daemon leaves the old or the new file."""
        data = {
            "incarnation": incarnation,
            "budget": budget.to_dict(
                now_ns=self._clock.monotonic_ns(), wall=self._clock.wall(), boot_id=self._boot
            ),
        }
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(part, self._path)
            self._told = False
        except OSError as error:
            if not self._told:
                self._told = True
                self._problem(f"the restart budget was not saved: {error.strerror or error}")
