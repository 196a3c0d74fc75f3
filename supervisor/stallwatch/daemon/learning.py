"""Learnt limits of one engine: fed by the runner's ticks, kept in state_dir, put into the policy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from stallwatch.watch import limits
from stallwatch.watch.learned import Learner
from stallwatch.watch.policy import Policy, S
from stallwatch.watch.snapshot import Snapshot

SAVE_EVERY_NS = 60 * S
_MAX = 1 << 20


class Learning:
    """One thread only, the runner's. Trouble with the file is told once, never raised.

    Who configured `default` chose every limit: then nothing is learnt.
    """

    def __init__(
        self,
        state_dir: Path,
        name: str,
        configured: Mapping[str, float],
        problem: Callable[[str], None],
    ) -> None:
        self._path = state_dir / "learned" / f"{name}.json"
        self._problem = problem
        self._told = False
        self._learner = Learner()
        self._due_ns = 0
        self.on = "default" not in configured
        if self.on:
            self._load()

    def policy(self, base: Policy) -> Policy:
        """The policy with what is known by now."""
        return limits.with_learned(base, self._learner.limits()) if self.on else base

    def turn(
        self,
        snapshot: Snapshot | None,
        *,
        serving: bool,
        compile_steps: int,
        raised: bool = False,
    ) -> bool:
        """One tick; True once a minute, when the policy should be made anew.

        raised: an operator's pause is in force, and limits say nothing.
        """
        if not self.on or snapshot is None:
            return False
        usual = serving and not raised and not _held(snapshot)
        if not usual or (snapshot.recall.steps or 0) < compile_steps:
            self._learner.forget_open(snapshot.now_ns)
            return False
        self._learner.look(snapshot.image, snapshot.now_ns)
        if snapshot.now_ns < self._due_ns or not self._learner.changed:
            return False
        self._due_ns = snapshot.now_ns + SAVE_EVERY_NS
        self._learner.changed = False
        self._save()
        return True

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file:
                self._learner.restore(json.loads(file.read(_MAX)))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            self._problem(f"{self._path} cannot be read ({error}): limits are learnt anew")

    def _save(self) -> None:
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(self._learner.to_dict(), file)
            os.replace(part, self._path)
            self._told = False
        except OSError as error:
            if not self._told:
                self._told = True
                self._problem(f"learnt limits were not saved: {error.strerror or error}")


def _held(snapshot: Snapshot) -> bool:
    """A pause, a debugger or a stop by signal: what takes long then is not usual."""
    recall, image = snapshot.recall, snapshot.image
    leases = image is not None and any(p.pause is not None for p in image.processes)
    return bool(leases or recall.traced_since_ns or recall.stopped_since_ns)
