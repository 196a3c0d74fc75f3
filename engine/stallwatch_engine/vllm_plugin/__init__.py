"""The vLLM plugin (entry-point group `vllm.general_plugins`): heartbeats and FAILURE answers.

Inert without STALLWATCH_BOARD. It never says goodbye on the board: the supervisor treats every exit
that it did not ask for as a failure, and a dying vLLM exits with status 0, so a goodbye would only
hide deaths.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from stallwatch_engine.phasemap import Installer, Row, ThreadLanes
from stallwatch_engine.vllm_plugin import roles

BOARD_VARIABLE = "STALLWATCH_BOARD"
MAP_VARIABLE = "STALLWATCH_PHASEMAP"

_log = logging.getLogger("stallwatch")
_installer: Installer | None = None


class PluginLanes(ThreadLanes):
    """The lanes of a vLLM process. Its role is decided at the first mark."""

    def __init__(self) -> None:
        super().__init__(self._join)
        self.is_api = False
        self.serving = False  # EngineCore's loop runs: waits are steps, no longer start-up
        self.in_utility = False
        self.failed = ""  # type of the error of the RPC that runs, see vllm_map

    def become_api(self) -> None:
        """The process builds an AsyncLLM: it serves, whatever its name is."""
        self.is_api = True

    @property
    def role(self) -> str:
        found = roles.of_process()
        return found.role if found is not None else "api"

    def forget(self) -> None:
        super().forget()
        self.is_api = self.serving = self.in_utility = False

    def _claim(self, name: str, ident: int) -> Any:
        if roles.of_process() is None and not self.is_api:
            return None  # `vllm --help`, an offline LLM: no lane
        return super()._claim(name, ident)

    def _join(self) -> Any:
        from stallwatch import heartbeat

        return heartbeat.attach(role=_who)


def _who() -> tuple[str, int]:
    """Asked by the heartbeat library at the first lane, and again in every forked child."""
    return roles.of_process() or roles.Role("api", 0)


def register() -> None:
    """Called by vLLM in every process, as early as it can. Never raises."""
    try:
        if os.environ.get(BOARD_VARIABLE) and not roles.is_inspector():
            _register()
    except Exception:  # an exception here would kill the engine process
        try:
            _log.exception("stallwatch: the vLLM plugin could not be installed")
        except Exception:
            pass


def _register() -> None:
    global _installer
    if _installer is not None:
        return
    lanes = PluginLanes()
    _installer = Installer(lanes)
    _installer.install(_rows(lanes))
    os.register_at_fork(after_in_child=lanes.forget)
    lane = lanes.get("main") if roles.of_process() and lanes.role != "api" else None
    if lane is not None:
        lane.enter("init", cls="start")
    if _installer.missing:
        _log.warning("stallwatch: not found in this vLLM: %s", _installer.missing)


def _rows(lanes: PluginLanes) -> list[Row]:
    from stallwatch_engine import hcu
    from stallwatch_engine.vllm_plugin import api, omni_map, usermap, vllm_map

    made: list[api.ApiSide] = []

    def side() -> api.ApiSide:
        if not made:
            made.append(api.ApiSide(lanes))
        return made[0]

    found = [*vllm_map.CORE_ROWS, *vllm_map.WORKER_ROWS, *api.rows(side)]
    found += hcu.rows()
    found += omni_map.from_environment()
    found += usermap.from_environment(MAP_VARIABLE)
    return found
