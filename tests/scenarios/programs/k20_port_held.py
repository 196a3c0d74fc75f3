"""K20: something of an earlier run still listens on the engine's port."""

# /// scenario
# kind = "LEFTOVER_RESOURCE"
# culprit = ""
# action = "fail"
# do = "hold-port"
# says = "is held by pid"
# port = true
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import stage


def main() -> None:
    stage.park()


stage.perform(main=main)
