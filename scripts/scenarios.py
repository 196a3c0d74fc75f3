"""Every scenario through the real daemon: expected, got, how late, what was done.

    make scenarios                          # all of them
    python scripts/scenarios.py k07 f01     # those whose names begin so
    python scripts/scenarios.py --subset --seed 3 --json

Exit status 1 when one was wrong; a wrong kind with high confidence is marked `!!`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "supervisor"), str(ROOT / "tests"), str(ROOT / "tests" / "scenarios")]

from running import Outcome, Scenario, run, scenarios  # noqa: E402 - after the path is set

COLUMNS = "{:<4} {:<24} {:<24} {:<36} {:>8} {:<8} {}"


def row(scenario: Scenario, outcome: Outcome) -> str:
    """One line of the table."""
    mark = "ok" if outcome.right else "!!" if overconfident(outcome) else "no"
    late = f"{outcome.late_s:.2f}s" if outcome.late_s is not None else "-"
    return COLUMNS.format(
        mark, scenario.name[:24], (scenario.kind or "no verdict")[:24],
        f"{outcome.got or '-'} {outcome.culprit}"[:36], late, outcome.action or "-",
        "; ".join(outcome.wrong),
    ).rstrip()  # fmt: skip


def overconfident(outcome: Outcome) -> bool:
    """A wrong kind that was said with high confidence."""
    return outcome.confidence == "high" and outcome.got != outcome.expected


def chosen(arguments: argparse.Namespace) -> list[Scenario]:
    names = tuple(arguments.names)
    found = [s for s in scenarios() if not names or s.name.startswith(names)]
    return [s for s in found if not (arguments.subset and s.slow)]


def show(scenario: Scenario, outcome: Outcome) -> None:
    """The line of the table, and under a wrong one what was said."""
    print(row(scenario, outcome), flush=True)
    if not outcome.right and outcome.summary:
        print(f"     {outcome.summary}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; none: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subset", action="store_true", help="leave the long ones out")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    todo = chosen(arguments)
    if not todo:
        parser.error("no scenario begins so")
    if not arguments.json:
        print(COLUMNS.format("", "scenario", "expected", "got", "late", "action", ""))
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for number, scenario in enumerate(todo, 1):
        sys.stderr.write(f"\r{number}/{len(todo)} {scenario.name:<30}\r")
        outcome = run(scenario, arguments.seed)
        outcomes.append(outcome)
        if not arguments.json:
            show(scenario, outcome)
    return tell(outcomes, time.monotonic() - began, as_json=arguments.json)


def tell(outcomes: list[Outcome], took_s: float, *, as_json: bool) -> int:
    right = sum(o.right for o in outcomes)
    worst = [o.scenario for o in outcomes if overconfident(o)]
    if as_json:
        table = [o.as_dict() for o in outcomes]
        print(json.dumps({"right": right, "of": len(outcomes), "scenarios": table}, indent=1))
    else:
        print(
            f"{right} of {len(outcomes)} right in {took_s:.0f} s; wrong and sure: {worst or 'none'}"
        )
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
