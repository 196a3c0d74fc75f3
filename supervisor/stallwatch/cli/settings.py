"""What the global flags say, wherever on the line they stand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

# For every command, not for the group alone: click keeps the first help option that a command made,
# and a command that was used without our group would have none by -h.
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
FORMATS = ("table", "wide", "json", "name")


@dataclass
class Settings:
    """One invocation's answers. The last flag on the line wins."""

    output: str = "table"
    color: bool | None = None  # None: decide from the terminal
    quiet: bool = False
    verbose: bool = False
    url: str = ""
    socket: str = ""
    token_file: str = ""
    state_dir: str = ""  # where reports are read when no daemon answers
    timeout: float = 10.0
    crash_code: int = 1  # exit code of an error that is ours; `serve` says 70

    @property
    def json(self) -> bool:
        return self.output == "json"


def settings() -> Settings:
    """The settings of the command that runs."""
    found = click.get_current_context().find_root().obj
    assert isinstance(found, Settings)
    return found


def from_environment() -> Settings:
    return Settings(
        url=os.environ.get("STALLWATCH_URL", ""), socket=os.environ.get("STALLWATCH_SOCKET", "")
    )


def _store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is None or value is False:
        return  # not given here; perhaps given at the other place
    root = ctx.find_root()
    if not isinstance(root.obj, Settings):
        root.obj = from_environment()
    name = str(param.name)
    if name == "no_color":
        root.obj.color = False
        return
    if name in ("url", "socket"):  # a flag of one kind beats the other kind's variable
        root.obj.url = root.obj.socket = ""
    setattr(root.obj, name, value)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """'60s', '1m30s', '250ms', or plain seconds; never zero."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = parse_seconds(str(value))
        if seconds is None:
            self.fail(f"{value!r} is no duration: write 60s, 1m30s or 250ms", param, ctx)
        if seconds <= 0:
            self.fail(f"{value!r} is no time at all: write more than zero, like 10s", param, ctx)
        return seconds


def parse_seconds(text: str) -> float | None:
    """The duration in seconds; None when it is none. Bare digits are seconds."""
    import re

    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        return float(text)
    part = r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d)"
    if not re.fullmatch(f"(?:{part})+", text):
        return None
    size = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return sum(float(number) * size[unit] for number, unit in re.findall(part, text))


def common(*, output: bool = True, remote: bool = True, ledger: bool = False) -> Callable[[F], F]:
    """The global flags, for the group and for each command."""
    given: dict[str, Any] = {"expose_value": False, "callback": _store}
    options = [
        click.option("-v", "--verbose", is_flag=True, help="Say more; tracebacks.", **given),
        click.option("-q", "--quiet", is_flag=True, help="No remarks on stderr.", **given),
        click.option("--no-color", is_flag=True, help="No colours (NO_COLOR too).", **given),
    ]
    if output:
        kind = click.Choice(FORMATS)
        options.append(
            click.option("-o", "--output", type=kind, help="Form of the output.", **given)
        )
    if remote:
        options += [
            click.option("--timeout", type=Duration(), help="Longest wait (10s).", **given),
            click.option("--url", help="Daemon's address (STALLWATCH_URL).", **given),
            click.option("--socket", help="Daemon's socket (STALLWATCH_SOCKET).", **given),
            click.option("--token-file", help="File with the token (STALLWATCH_TOKEN).", **given),
        ]

    if ledger:
        said = "Read the ledger there when its daemon does not answer."
        options.append(click.option("--state-dir", metavar="DIR", help=said, **given))

    def apply(command: F) -> F:
        for option in options:
            command = option(command)
        return command

    return apply
