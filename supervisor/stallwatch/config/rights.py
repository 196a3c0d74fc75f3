"""A configuration file that holds a secret is nobody else's to read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stallwatch import rights
from stallwatch.errors import ConfigError
from stallwatch.evidence.redact import MIN_KNOWN, known_secrets

if TYPE_CHECKING:
    from stallwatch.config.model import Config


def refuse_loose(config: Config, status: os.stat_result, where: str) -> None:
    """Raise ConfigError when the file holds a secret that others on this machine could read."""
    if not rights.is_loose(status):
        return
    place = _secret_place(config)
    if place:
        wrong, mend = rights.refusal(status, where)
        raise ConfigError(
            f"{place} holds a secret, and {wrong}",
            where=where,
            hint=f"{mend}; or take the secret out of it: engines inherit the daemon's environment",
        )


def _secret_place(config: Config) -> str:
    """The first key that holds a secret, '' for none. Short values and paths are none."""
    for name, engine in config.engines.items():
        for value in known_secrets(engine.command, engine.env):
            if len(value) >= MIN_KNOWN and not value.startswith(("/", "{")):
                return f"[engines.{name}]"
    if config.hooks is not None:
        if config.hooks.holds_secret:
            return "[hooks] webhook"
        if any(len(value) >= MIN_KNOWN for value in known_secrets(config.hooks.command, {})):
            return "[hooks] command"
    return ""
