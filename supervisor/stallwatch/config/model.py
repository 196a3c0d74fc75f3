"""The configuration as pydantic models. Immutable; all durations are seconds after parsing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from stallwatch.config.base import RELOADABLE, Duration, Limit, StrictModel, split_address
from stallwatch.config.gateway import GatewayConfig
from stallwatch.config.hooks import HooksConfig

Port = Annotated[int, Field(ge=1, le=65535, strict=True)]

ENGINE_NAME = re.compile(r"[a-z0-9-]{1,63}")
DEFAULT_CONTROL = "127.0.0.1:9470"


class ReadyConfig(StrictModel):
    """What else must be true before READY: an HTTP probe that answers 200."""

    http: str = Field(
        default="",
        description="A path (on `port`), a URL (`http:`, `https:`) or `unix:PATH` that must answer "
        "200 to 399 before READY",
    )

    @field_validator("http")
    @classmethod
    def _known_form(cls, value: str) -> str:
        if value and not value.startswith(("/", "http://", "https://", "unix:")):
            raise ValueError(f"{value!r} is neither a path ('/health'), a URL nor 'unix:PATH'")
        if not _names_a_place(value):
            raise ValueError(
                f"{value!r} names no host or socket: write e.g. 'http://localhost:8001/health'"
            )
        return value


def _names_a_place(value: str) -> bool:
    if value.startswith("unix:"):
        return value.removeprefix("unix:").removeprefix("//").startswith("/")
    try:
        url = urlsplit(value)
        return not url.scheme or (bool(url.hostname) and url.port != 0)
    except ValueError:  # a port that is none
        return False


class RestartConfig(StrictModel):
    """When and how often an engine is started again."""

    policy: Literal["by-kind", "always", "never"] = Field(
        default="by-kind",
        description='`"by-kind"`: kinds that a restart cannot cure are not restarted',
    )
    budget: Annotated[int, Field(ge=1, le=1000, strict=True)] = Field(
        default=5, description="Restarts within `window`; one more is EXHAUSTED"
    )
    window: Limit = Field(
        default=1800.0, description="The time in which `budget` restarts are allowed"
    )
    backoff: tuple[Duration, ...] = Field(
        default=(1.0, 5.0, 15.0, 60.0, 120.0),
        description="Waits before the first, second, ... restart within `window`, each longer by "
        "up to 20 %; the last one repeats",
    )
    backoff_cap: Limit = Field(default=300.0, description="No wait before a restart is longer")
    healthy_after: Limit = Field(default=600.0, description="This long READY resets the back-off")


class EngineConfig(StrictModel):
    """One engine: a command line, its port, its limits, and what is done about a stall."""

    command: tuple[str, ...] = Field(
        description="The engine's command line; no shell is used. `{port}`, `{name}`, "
        "`{incarnation}`, `{run_dir}` are replaced, other braces pass"
    )
    port: Port | None = Field(
        default=None,
        description="The port it will listen on; checked before each start, and its listener must "
        "be a process of the engine",
    )
    ready: ReadyConfig = Field(default=ReadyConfig(), description="What READY waits for besides")
    enforce: Annotated[Literal["observe", "fail", "restart"], RELOADABLE] = Field(
        default="restart",
        description='`"observe"`: verdict and report only. `"fail"`: fail the clients and kill. '
        '`"restart"`: and start again',
    )
    limits: Annotated[dict[str, Limit], RELOADABLE] = Field(
        default_factory=dict, description="Limits by phase"
    )
    restart: Annotated[RestartConfig, RELOADABLE] = Field(
        default=RestartConfig(), description="When and how often it is started again"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Added to the daemon's environment for the engine"
    )
    cwd: Path | None = Field(
        default=None, description="The engine's working directory; without it, the daemon's"
    )
    stop_grace: Limit = Field(
        default=30.0,
        description="A stop waits so long after SIGTERM to the root process, then kills",
    )
    drain: Duration = Field(
        default=30.0,
        description="A stop waits so long for running requests before it sends SIGTERM",
    )
    plugin: Literal["auto", "inject", "off"] = Field(
        default="auto",
        description="The vLLM plugin and the heartbeat library on the engine's PYTHONPATH. "
        '`"auto"`: where they are missing. `"inject"`: always. `"off"`: never',
    )
    logs: Literal["passthrough", "file"] = Field(
        default="passthrough",
        description="The engine's output is kept in a file; `passthrough` copies it to our "
        "stderr too",
    )

    @field_validator("command", mode="before")
    @classmethod
    def _a_list(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(  # noqa: TRY004 - pydantic turns ValueError into our sentence
                f"{value!r} is one string: write a list of strings, no shell is ever used"
            )
        return value

    @field_validator("command")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not value[0].strip():
            raise ValueError(
                "the command is empty: give the engine's command line as a list of strings"
            )
        if any("\0" in part for part in value):
            raise ValueError("the command holds a NUL byte")
        return value

    @field_validator("limits")
    @classmethod
    def _limit_names(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_./:-]{1,64}", name):
                raise ValueError(f"{name!r} is no phase name")
        return value


class SupervisorConfig(StrictModel):
    """The daemon itself."""

    control: str = Field(
        default=DEFAULT_CONTROL,
        description="`HOST:PORT` of the control HTTP. Off loopback it refuses to start without a "
        "token",
    )
    state_dir: Path | None = Field(
        default=None,
        description="Ledger, artefacts, restart budgets, state file; private (0700). Without it, "
        "systemd's or the XDG state directory",
    )
    socket: Path | None = Field(
        default=None,
        description="Unix socket (0600) for everything that changes something. Without it, "
        "`control.sock` in a `state_dir` that is set, else in the runtime directory, else in the "
        "default state directory",
    )
    health_listen: str = Field(
        default="", description="`HOST:PORT` that serves only the three probes and /metrics"
    )
    token_file: Path | None = Field(
        default=None,
        description="File (0600) with the bearer token for what TCP may not do without one (or "
        "`STALLWATCH_TOKEN`)",
    )
    exit_when: Literal["all", "any", "never"] | None = Field(
        default=None,
        description="The daemon ends when all (any) engines are given up. Without it "
        '`"never"`; `serve -- COMMAND`: `"all"`',
    )
    period: Limit = Field(default=0.1, description="Time between two looks")
    shm: Path = Field(
        default=Path("/dev/shm"),  # noqa: S108 - boards must live on tmpfs
        description="Where boards are made; must be a tmpfs",
    )
    chaos: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Faults may be injected on purpose ([chaos.md](chaos.md)); never in production",
    )
    max_stalls: Annotated[int, Field(ge=1, le=100_000, strict=True)] = Field(
        default=64, description="Reports kept in the ledger; the oldest go first"
    )
    max_evidence_mib: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = Field(
        default=256, description="MiB of evidence files kept; the oldest go first"
    )

    @field_validator("control", "health_listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value:
            split_address(value)
        return value


class Config(StrictModel):
    """Everything. `source` is the file it came from, or '' for flags."""

    supervisor: SupervisorConfig = SupervisorConfig()
    engines: dict[str, EngineConfig] = Field(default_factory=dict)
    gateway: GatewayConfig | None = None
    hooks: HooksConfig | None = None
    source: str = ""

    def describe(self) -> dict[str, Any]:
        """The configuration in force, JSON-ready, durations in seconds."""
        return self.model_dump(mode="json")
