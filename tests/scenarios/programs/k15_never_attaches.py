"""K15 without any heartbeat: a process that sleeps in its imports and never says a word."""

# /// scenario
# kind = "NEVER_READY"
# culprit = "pid:*"
# action = "restart"
# limits = { default = "1500ms", start = "30s", start_silence = "3s" }
# port = true
# ///

from __future__ import annotations

import time

import stage


def main() -> None:
    time.sleep(3600)


stage.perform(main=main)
