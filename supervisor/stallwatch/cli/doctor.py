"""`doctor`: would the evidence be there, if something stalled tonight?"""

from __future__ import annotations

import dataclasses

import click

from stallwatch.cli.output import clean, colored, out, out_json, say
from stallwatch.cli.settings import HELP, common, settings

_COLORS = {"ok": "32", "warn": "33", "fail": "31"}


@click.command(context_settings=HELP)
@common(remote=False)
def doctor() -> int:
    """Check this machine. Exit 0: good or only warnings; 1: something fails."""
    from stallwatch.doctor.report import examine, exit_code

    results = examine()
    if settings().json:
        out_json({"checks": [dataclasses.asdict(each) for each in results]})
        return exit_code(results)
    width = max(len(each.name) for each in results)
    for each in results:
        mark = f"[{each.level}]".ljust(6)
        if colored():
            mark = f"\x1b[{_COLORS[each.level]}m{mark}\x1b[0m"
        out(f"{mark} {each.name:<{width}}  {clean(each.message)}")
        if each.remedy:
            out(f"{'':<{width + 7}}  -> {clean(each.remedy)}")
    failed = exit_code(results)
    say(
        "something fails: mend it before you need it"
        if failed
        else "ready for three in the morning"
    )
    return failed
