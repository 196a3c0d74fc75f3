"""From a file or from flags to a Config. Every mistake is named with its place and its mend."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stallwatch.config.gateway import GatewayConfig, GatewayLimits
from stallwatch.config.hooks import HooksConfig
from stallwatch.config.model import (
    ENGINE_NAME,
    Config,
    EngineConfig,
    ReadyConfig,
    RestartConfig,
    SupervisorConfig,
)
from stallwatch.config.rights import refuse_loose
from stallwatch.errors import ConfigError

TABLES: dict[str, type[BaseModel]] = {
    "supervisor": SupervisorConfig,
    "engines.*": EngineConfig,
    "engines.*.restart": RestartConfig,
    "engines.*.ready": ReadyConfig,
    "gateway": GatewayConfig,
    "gateway.limits": GatewayLimits,
    "hooks": HooksConfig,
}
_TOP = ("supervisor", "engines", "gateway", "hooks")
_MAX_FILE = 1 << 20
GATEWAY = "gateway"


def load(path: Path) -> Config:
    """Read and check a TOML file. Raises ConfigError (exit 78) for anything that is wrong."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read it: {error.strerror or error}",
            where=str(path),
            hint="check the path and its rights",
        ) from error
    if len(raw) > _MAX_FILE:
        raise ConfigError("larger than 1 MiB: this is no Stallwatch configuration", where=str(path))
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"no valid TOML: {error}", where=str(path), hint="see docs/configuration.md"
        ) from error
    config = build(data, source=str(path))
    refuse_loose(config, status, str(path))
    return config


def build(data: Mapping[str, Any], *, source: str) -> Config:
    """Check a parsed configuration. Raises ConfigError."""
    where = source or "command line"
    for key in data:
        if key not in _TOP:
            raise ConfigError(f"unknown table [{key}]", where=where, hint=_nearest(key, _TOP))
    try:
        config = Config(**{**data, "source": source})
    except ValidationError as error:
        raise _translate(error, where) from error
    _check(config, where)
    return config


def build_gateway(table: Mapping[str, Any], *, source: str) -> GatewayConfig:
    """The [gateway] table alone, for a gateway that is started by itself. Raises ConfigError."""
    try:
        return GatewayConfig(**table)
    except ValidationError as error:
        raise _translate(error, source or "command line") from error


def from_command(
    command: Sequence[str],
    *,
    name: str = "engine",
    observe: bool = False,
    engine_port: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Config, tuple[str, ...]]:
    """One engine from a command line, with the remarks that belong on stderr.

    `--port N` in the command is the engine's port; `vllm serve` without one gets `--port 8001`.
    `overrides` holds the tables `supervisor` and `engine` as they would stand in the file.
    """
    extra = dict(overrides or {})
    args, port, remarks = _find_port(list(command), engine_port)
    engine: dict[str, Any] = {"command": args, **extra.get("engine", {})}
    if port is not None:
        engine["port"] = port
    if observe:
        engine["enforce"] = "observe"
    supervisor = {"exit_when": "all", **extra.get("supervisor", {})}
    tables: dict[str, Any] = {"supervisor": supervisor, "engines": {name: engine}}
    if extra.get("gateway"):
        tables["gateway"] = extra["gateway"]
    return build(tables, source=""), remarks


def _find_port(
    args: list[str], wanted: int | None
) -> tuple[list[str], int | None, tuple[str, ...]]:
    if wanted is not None:
        return args, wanted, ()
    for index, arg in enumerate(args):
        value = args[index + 1] if arg == "--port" and index + 1 < len(args) else ""
        if arg.startswith("--port="):
            value = arg.removeprefix("--port=")
        if value.isdigit():
            return args, int(value), ()
    if [os.path.basename(a) for a in args[:2]] == ["vllm", "serve"]:
        return [*args, "--port", "8001"], 8001, ("vllm serve has no --port: added --port 8001",)
    return args, None, ()


def _check(config: Config, where: str) -> None:
    if not config.engines:
        raise ConfigError(
            "no engine: nothing to supervise",
            where=where,
            hint="add a table [engines.NAME] with a command, or use `stallwatch serve -- COMMAND`",
        )
    ports: dict[int, str] = {}
    for name, engine in config.engines.items():
        place = f"[engines.{name}]"
        if not ENGINE_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no engine name",
                where=where,
                hint="use a-z, 0-9 and '-', at most 63 characters",
            )
        if engine.port is not None and engine.port in ports:
            raise ConfigError(
                f"{place} and [engines.{ports[engine.port]}] both use port {engine.port}",
                where=where,
                hint="give each engine its own port",
            )
        if engine.port is not None:
            ports[engine.port] = name
        if engine.port is None and any("{port}" in part for part in engine.command):
            raise ConfigError(
                f"{place}: the command uses {{port}} but no port is set",
                where=where,
                hint="add `port = 8001`",
            )
        if engine.port is None and engine.ready.http.startswith("/"):
            raise ConfigError(
                f"{place}: ready.http is a path but no port is set",
                where=where,
                hint="add `port = 8001` or write a URL",
            )

    if config.gateway is not None:
        _check_gateway(config, config.gateway, where)


def _check_gateway(config: Config, gateway: GatewayConfig, where: str) -> None:
    if GATEWAY in config.engines:
        raise ConfigError(
            f"[engines.{GATEWAY}]: the gateway itself goes by this name",
            where=where,
            hint="give the engine another name",
        )
    for name in (*gateway.engines, *gateway.upstreams):
        if name not in config.engines:
            raise ConfigError(
                f"[gateway] names {name!r}, which is no engine",
                where=where,
                hint=_nearest(name, tuple(config.engines)),
            )
    for name in gateway.engines or config.engines:
        engine = config.engines[name]
        if engine.port is None and name not in gateway.upstreams and gateway.engines:
            raise ConfigError(
                f"[gateway]: engine {name!r} has no port",
                where=where,
                hint=f"set its `port`, or add `upstreams.{name} = 'unix:/PATH'`",
            )
        if gateway.port is not None and engine.port == gateway.port:
            raise ConfigError(
                f"[gateway] and [engines.{name}] both use port {gateway.port}",
                where=where,
                hint="give the gateway its own port",
            )
    if all(e.port is None for e in config.engines.values()) and not gateway.upstreams:
        raise ConfigError(
            "[gateway]: no engine has a port",
            where=where,
            hint="set the engine's `port`, or `upstreams`",
        )


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _table_of(location: Sequence[int | str]) -> tuple[str, type[BaseModel] | None]:
    """The table a key stands in, by its location, and the model that knows its keys."""
    parts = [str(p) for p in location[:-1]]
    pattern = ".".join(
        "*" if parts[:1] == ["engines"] and i == 1 else p for i, p in enumerate(parts)
    )
    return ".".join(parts), TABLES.get(pattern)


def _translate(error: ValidationError, where: str) -> ConfigError:
    # An unknown key first: a missing one is often the same key misspelt.
    found = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first: ErrorDetails = found[0]
    location = [p for p in first["loc"] if not isinstance(p, int)]
    key = str(location[-1]) if location else "?"
    table, model = _table_of(location)
    place = f"[{table}]" if table else ""
    if first["type"] == "extra_forbidden":
        known = tuple(model.model_fields) if model else ()
        return ConfigError(
            f"{place} unknown key {key!r}".strip(),
            where=where,
            hint=_nearest(key, known) if known else "see docs/configuration.md",
        )
    if first["type"] == "missing":
        return ConfigError(
            f"{place} {key!r} is missing".strip(), where=where, hint="see docs/configuration.md"
        )
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] != "value_error":
        message = f"{message} (got {first['input']!r})"
    return ConfigError(
        f"{place} {key}: {message}".strip(), where=where, hint="see docs/configuration.md"
    )
