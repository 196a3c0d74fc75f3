"""`top`: the live view in a terminal."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

import click

from stallwatch.cli.client import client
from stallwatch.cli.output import colored
from stallwatch.cli.settings import HELP, Duration, common
from stallwatch.errors import StallwatchError


class NoTerminal(StallwatchError):
    """The live view was asked for where there is no terminal (exit 2)."""

    exit_code: ClassVar[int] = 2


@click.command(context_settings=HELP)
@click.option("--readonly", is_flag=True, help="Look only: no key changes anything.")
@click.option("--every", type=Duration(), default="500ms", show_default=True, help="Between looks.")
@common(output=False)
def top(*, readonly: bool, every: float) -> int:
    """Engines, lanes and stalls, live. `?` lists the keys, `q` leaves."""
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    if not tty or os.environ.get("TERM", "dumb") == "dumb":
        raise NoTerminal("top needs a terminal: `stallwatch status` prints the same once.")
    from stallwatch.top.feed import Feed, look
    from stallwatch.top.screen import Screen
    from stallwatch.top.view import View

    daemon = client()
    first = look(daemon, "")  # an address that is wrong from the start is an error, not a view
    feed = Feed(daemon, first, every_s=every)
    view = View(readonly=readonly)
    return Screen(feed, view, where=daemon.where, color=colored()).run()
