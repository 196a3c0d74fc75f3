"""Where clients connect, in one place for the log, the status and the words at READY."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stallwatch.config.model import Config


def door(config: Config, name: str) -> str:
    """The address for clients of an engine (or of the gateway): its gateway's, else its own port's.

    '' when nobody knows: an engine without a port and without a gateway in front of it.
    """
    gateway = config.gateway
    engine = config.engines.get(name)
    if gateway is not None and (engine is None or name in (gateway.engines or (name,))):
        return gateway.listen if gateway.port is None else f"http://{gateway.listen}"
    return f"http://127.0.0.1:{engine.port}" if engine is not None and engine.port else ""


def doors(config: Config) -> dict[str, list[str]]:
    """Each address, and the engines that are served there."""
    found: dict[str, list[str]] = {}
    for name in config.engines:
        if address := door(config, name):
            found.setdefault(address, []).append(name)
    return found


def words(config: Config) -> str:
    """'clients connect to http://127.0.0.1:8001 (chat)', or '' when no address is known."""
    listed = ", ".join(f"{place} ({', '.join(names)})" for place, names in doors(config).items())
    return f"clients connect to {listed}" if listed else ""
