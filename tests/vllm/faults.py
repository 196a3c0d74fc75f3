"""Break a running vLLM on demand: the test side of `faultsite/stallwatch_test_faults.py`.

    faults = Faults(tmp_path)
    environment.update(faults.environment(os.environ))   # before vLLM starts
    ...
    faults.arm("worker/execute_model", "block_in_c")     # the next step of the worker blocks
    done = faults.wait_done()                            # {"place", "fault", "pid", "at_ns"}

Places: worker/execute_model, worker/load_model (arm before the start), worker/output (needs
`asynchronous=True`), core/schedule, core/output (the output thread), api/loop.
Faults: block_in_c (GIL released), hold_gil, spin, raise, sleep; at worker/output: event_never,
event_late, event_raises. A fault happens once; `rank` picks one worker. SIGSTOP and SIGKILL need no
plugin: send them from outside.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SITE = Path(__file__).with_name("faultsite")


class Faults:
    """One file that one running vLLM looks at."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fault.json"

    def environment(self, base: Mapping[str, str], *, asynchronous: bool = False) -> dict[str, str]:
        """What to change in the environment of vLLM. stallwatch_engine must be importable there."""
        parts = [str(SITE), *(part for part in base.get("PYTHONPATH", "").split(":") if part)]
        changes = {"STALLWATCH_TEST_FAULTS": str(self.path), "PYTHONPATH": ":".join(parts)}
        if asynchronous:
            changes["STALLWATCH_TEST_ASYNC_OUTPUT"] = "1"
        if "VLLM_PLUGINS" in base:
            changes["VLLM_PLUGINS"] = f"{base['VLLM_PLUGINS']},stallwatch_test_faults"
        return changes

    def arm(self, place: str, fault: str, *, rank: int | None = None) -> None:
        """Make the next call at `place` do `fault`."""
        self.clear()
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"place": place, "fault": fault, "rank": rank}))
        os.replace(fresh, self.path)

    def clear(self) -> None:
        """Disarm, and forget what was done."""
        for name in (self.path, self._done, Path(f"{self.path}.taken")):
            name.unlink(missing_ok=True)

    def wait_done(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """What happened, as soon as it did: place, fault, pid and monotonic time of the victim."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                done: dict[str, Any] = json.loads(self._done.read_text())
            except (OSError, ValueError):
                time.sleep(0.005)  # a poll with a deadline, not a fixed wait
            else:
                return done
        raise TimeoutError(f"no process did what {self.path} asks for")

    @property
    def _done(self) -> Path:
        return Path(f"{self.path}.done")
