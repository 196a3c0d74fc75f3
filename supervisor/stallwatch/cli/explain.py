"""`explain`: what a kind of stall means, whom it accuses, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stallwatch.cli.output import out, out_json, table
from stallwatch.cli.settings import HELP, common, settings

if TYPE_CHECKING:
    from stallwatch.diagnosis.kinds import Kind


@click.command(context_settings=HELP)
@click.argument("kind", required=False)
@common(remote=False)
def explain(kind: str | None) -> None:
    """What a KIND of stall means and what to do about it; without KIND, all of them."""
    from stallwatch.diagnosis.kinds import KINDS
    from stallwatch.evidence import kindpage

    if kind is not None:
        _one(_named(kind))
    elif settings().json:
        out_json({"items": [kindpage.as_json(each) for each in KINDS]})
    elif settings().output == "name":
        for each in KINDS:
            out(str(each))
    else:
        table(["CODE", "KIND", "MEANS"], [[i.code, k, i.meaning] for k, i in KINDS.items()])


def _one(kind: Kind) -> None:
    from stallwatch.evidence import kindpage

    if settings().json:
        out_json(kindpage.as_json(kind))
    elif settings().output == "name":
        out(str(kind))
    else:
        for line in kindpage.lines(kind):
            out(line)


def _named(given: str) -> Kind:
    """The kind for a name or a code in any case. Usage error with the nearest one."""
    from difflib import get_close_matches

    from stallwatch.diagnosis.kinds import KINDS, Kind

    word = given.strip().upper().replace("-", "_")
    codes = {info.code: kind for kind, info in KINDS.items() if info.code}
    names = [str(kind) for kind in KINDS]
    if word in names:
        return Kind(word)
    if word in codes:
        return codes[word]
    near = get_close_matches(word, [*names, *codes], n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]!r}?" if near else "`stallwatch explain` lists them."
    shown = "".join(c if c.isprintable() else "?" for c in given[:40])
    raise click.UsageError(f"no kind {shown!r}. {hint}")
