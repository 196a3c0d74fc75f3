"""`stallwatch version`."""

from __future__ import annotations

import click

from stallwatch import __version__
from stallwatch.cli.output import out, out_json
from stallwatch.cli.settings import HELP, common, settings


@click.command(context_settings=HELP)
@common(remote=False)
def version() -> None:
    """The version."""
    if settings().json:
        out_json({"stallwatch": __version__})
    else:
        out(__version__ if settings().output == "name" else f"stallwatch {__version__}")
