"""`stallwatch version`."""

from __future__ import annotations

import click

from stallwatch import __version__
from stallwatch.cli.output import out, out_json
from stallwatch.cli.settings import common, settings


@click.command()
@common(remote=False)
def version() -> None:
    """The version."""
    if settings().json:
        out_json({"stallwatch": __version__})
    else:
        out(__version__ if settings().output == "name" else f"stallwatch {__version__}")
