"""`stalls` and `show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from stallwatch.cli.output import clean, fitted, out, out_json
from stallwatch.cli.reports import Reports, reports
from stallwatch.cli.settings import HELP, common, settings
from stallwatch.cli.status import stall_table
from stallwatch.errors import UnknownEngine


@click.command(context_settings=HELP)
@click.option("--engine", help="Only of this engine.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@common(ledger=True)
def stalls(engine: str | None, limit: int) -> None:
    """Stalls, newest first."""
    found = reports().stalls(limit, engine)
    if settings().json:
        out_json({"items": found})
    elif settings().output == "name":
        for each in found:
            out(clean(each["id"]))
    elif found:
        stall_table(found, wide=settings().output == "wide")
    else:
        out("(none)")


def full_id(kept: Reports, given: str) -> str:
    """The id for what was typed: itself, 'last', or the digits at its end."""
    if given.startswith("st-"):
        return given
    newest = [str(each["id"]) for each in kept.stalls(1000)]
    if not newest:
        raise UnknownEngine("the ledger is empty: nothing has stalled")
    if given == "last":
        return newest[0]
    match = [each for each in newest if len(given) >= 4 and each.endswith(given)]
    if len(match) == 1:
        return match[0]
    what = "more than one stall ends" if match else "no stall's id ends"
    raise UnknownEngine(f"{what} with {given!r}", hint="`stallwatch stalls` lists them")


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as text for people."""
    from stallwatch.evidence.text import render

    for part in render(report):
        yield from part.splitlines() or [""]


@click.command(context_settings=HELP)
@click.argument("stall_id", metavar="ID")
@common(ledger=True)
def show(stall_id: str) -> None:
    """The report of one stall. ID may be its last digits, or `last`."""
    kept = reports()
    report = kept.report(full_id(kept, stall_id))
    if settings().json:
        out_json(report)
        return
    try:
        for line in fitted(map(clean, report_lines(report))):
            out(line)
    except ImportError:
        out_json(report)
