"""`chaos`: faults on purpose, and a report card of what was found. Off unless the daemon allows it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stallwatch.cli.client import Client, client, segment
from stallwatch.cli.output import clean, out, out_json, say
from stallwatch.cli.settings import HELP, Duration, common, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stallwatch.chaos.card import Card

FAULTS = ("stop", "kill", "gil", "spin", "block", "slow", "leak-fd", "fill-pipe")
_TAKE_S = 15.0  # the daemon waits up to 5 s for the engine to take an order
_POLL_S = 0.1
_QUIET_S = 10.0  # how long a fault that need not stall anything is watched


@click.group(context_settings=HELP)
@common()
def chaos() -> None:
    """Inject faults on purpose, and grade what is found.

    `inject` needs `chaos = true` under [supervisor] in the daemon's configuration, and its socket or
    token. `run` starts a supervisor of its own. Exit 3: what was found was not right.
    """


@chaos.command(context_settings=HELP)
@click.argument("name")
@click.argument("fault", type=click.Choice(FAULTS))
@click.option("--on", default="", metavar="ADDRESS", help="worker:0, worker:0/model, pid:123.")
@click.option("--seed", type=click.IntRange(0, 2**53 - 1), default=0, help="Picks the target.")
@click.option("--for", "seconds", type=Duration(), help="The fault's end (its limit and 10s).")
@click.option("--wait", "wait_s", type=Duration(), help="Longest wait for a verdict.")
@common()
def inject(
    name: str, *, fault: str, on: str, seed: int, seconds: float | None, wait_s: float | None
) -> int:
    """Inject FAULT into the running engine NAME."""
    from stallwatch.chaos.card import fault_done, grade

    daemon = client()
    path = f"/v1/engines/{segment(name)}"
    known = _ids(daemon, name)
    body = {"fault": fault, "on": on, "seed": seed, "seconds": seconds or 0.0}
    said = daemon.post(f"{path}:chaos", body, timeout=max(settings().timeout, _TAKE_S))
    done = fault_done(said)
    where = "/".join(filter(None, (str(said["process"]), str(said.get("lane", "")))))
    say(f"{fault} into {clean(where)} (pid {said['pid']}), at most {said['seconds']:g} s")
    longest = wait_s or (_QUIET_S if done.may_stay_quiet else float(said["seconds"]) + 5.0)
    report = _first_new(daemon, name, known, longest)
    card = grade(done, report)
    card.target = clean(where)
    return _tell([card])


@chaos.command(context_settings=HELP)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--seed", type=click.IntRange(0, 2**53 - 1), default=0)
@click.option("--wait", "wait_s", type=Duration(), default="60s", show_default=True)
@common(remote=False)
def run(paths: tuple[Path, ...], *, seed: int, wait_s: float) -> int:
    """Run scenario programs, each under a supervisor of its own."""
    from stallwatch.chaos import scenario

    found = [scenario.read(path) for path in paths]  # all of them first: a bad one costs no run
    cards = []
    for each in found:
        say(f"{each.path.name} ...")
        cards.append(scenario.run(each, seed, wait_s=wait_s))
    return _tell(cards)


def _ids(daemon: Client, name: str) -> set[str]:
    found = daemon.get("/v1/stalls", engine=name, limit=1000)["items"]
    return {str(each["id"]) for each in found}


def _first_new(daemon: Client, name: str, known: set[str], wait_s: float) -> dict[str, Any] | None:
    """The first verdict since then, whole; None when none came in time."""
    from stallwatch.chaos.scenario import finished

    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        items = daemon.get("/v1/stalls", engine=name, limit=1000)["items"]
        fresh = [str(each["id"]) for each in items if str(each["id"]) not in known]
        if fresh:
            return finished(daemon, segment(fresh[-1]))
        time.sleep(_POLL_S)
    return None


def _tell(cards: Sequence[Card]) -> int:
    """The cards on stdout; 3 unless all are right."""
    from stallwatch.chaos.card import lines

    if settings().json:
        out_json({"items": [card.as_json() for card in cards]})
    elif settings().output == "name":
        for card in cards:
            out(clean(card.report or "-"))
    else:
        for line in lines(cards):
            out(clean(line))
    return 0 if all(card.grade == "right" for card in cards) else 3
