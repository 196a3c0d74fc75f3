"""`restart`, `drain`, `pause` and `stacks`: over the socket, or with a token."""

from __future__ import annotations

from typing import Any

import click

from stallwatch.cli.client import client, segment
from stallwatch.cli.output import clean, out, out_json
from stallwatch.cli.settings import HELP, Duration, common, settings

_STACKS_S = 20.0  # the daemon needs at most 15


def _verb(name: str, verb: str, body: dict[str, Any] | None = None) -> None:
    answer = client().post(f"/v1/engines/{segment(name)}:{verb}", body)
    if settings().json:
        out_json(answer)
    else:
        out(clean(name if settings().output == "name" else answer["message"]))


@click.command(context_settings=HELP)
@click.argument("name")
@common()
def restart(name: str) -> None:
    """Restart an engine; resets EXHAUSTED and UNKILLABLE."""
    _verb(name, "restart")


@click.command(context_settings=HELP)
@click.argument("name")
@common()
def drain(name: str) -> None:
    """Let an engine finish its requests, then stop it."""
    _verb(name, "drain")


@click.command(context_settings=HELP)
@click.argument("name")
@click.option(
    "--for",
    "seconds",
    type=Duration(),
    default="10m",
    show_default=True,
    help="10m, 1h30m; 10 is seconds.",
)
@common()
def pause(name: str, seconds: float) -> None:
    """Raise an engine's limits for a while. The lease ends by itself."""
    _verb(name, "pause", {"seconds": seconds})


@click.command(context_settings=HELP)
@click.argument("name")
@click.option("--native", is_flag=True, help="Native frames too; stops each process briefly.")
@common()
def stacks(name: str, *, native: bool) -> None:
    """Take the stacks of all processes of an engine now."""
    timeout = max(settings().timeout, _STACKS_S)
    found = client().post(f"/v1/engines/{segment(name)}:stacks", timeout=timeout, native=native)
    if settings().json:
        out_json(found)
        return
    if settings().output == "wide":
        for process in found.get("processes", []):
            _process(process, found)
        return
    from stallwatch.evidence.text import render_live

    for line in render_live(found):
        out(clean(line))


def _process(process: dict[str, Any], found: dict[str, Any]) -> None:
    """Every thread by itself; the short form merges equal stacks of all processes."""
    pid = process.get("pid")
    out(clean(f"Process {pid} {process.get('address', '')} ({process.get('rung', '?')})"))
    for problem in process.get("problems") or []:
        out(f"  note: {clean(problem)}")
    for stack in found.get("stacks") or []:
        for thread in stack.get("threads") or [] if stack.get("pid") == pid else []:
            gil = " (holds the GIL)" if thread.get("owns_gil") else ""
            out(clean(f"  Thread {thread.get('tid', '?')}{gil}: {thread.get('name', '')}"))
            for frame in thread.get("frames") or []:
                out(f"    {clean(frame)}")
    out()
