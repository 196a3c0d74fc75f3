"""Scenarios as a test: a subset by default, all of them with STALLWATCH_SCENARIOS=all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `running` lies beside this file

from running import PROGRAMS, Scenario, impossible, run, scenarios

from stallwatch.diagnosis.kinds import KINDS, Action, Kind

EVERYTHING = os.environ.get("STALLWATCH_SCENARIOS") == "all"
SEED = int(os.environ.get("STALLWATCH_SEED", "0"))
# Kinds that need their own look in CI; the others are covered by hand-built cases there.
SUBSET = (
    "k02_two_ranks", "k03_ring", "k04_dropped_message", "k05_unschedulable_head",
    "k06_dead_sender", "k11_traceback", "k12_forked_lock", "k13_stale_lock", "k14_lazy_load",
    "k16_blocked_handler", "k18_shutdown", "k19_dead_driver", "k20_port_held", "k21_send_blocked",
    "f01_compile_in_serving", "f01_long_prefill", "f05_suspended", "f12_debugger",
)  # fmt: skip
ALL = scenarios()


def _chosen() -> list[Scenario]:
    return [s for s in ALL if EVERYTHING or s.name in SUBSET]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("scenario", _chosen(), ids=lambda s: s.name)
def test_a_scenario_is_named_as_its_header_says(scenario: Scenario) -> None:
    """Kind, culprit, action and edges are those of the header; a false alarm gets no verdict."""
    if why := impossible(scenario):
        pytest.skip(why)
    outcome = run(scenario, SEED)
    assert outcome.right, f"{outcome.wrong}: {outcome.summary}"


def test_every_kind_and_every_false_alarm_has_a_program() -> None:
    """K01 to K23, and F1 to F12."""
    codes = {s.code for s in ALL}
    kinds = {info.code for info in KINDS.values() if info.code}
    assert kinds <= codes
    assert {f"F{n:02}" for n in range(1, 13)} <= codes


def test_headers_say_what_the_table_of_kinds_says() -> None:
    """A header's kind is one of ours and belongs to its number; its action is that kind's own."""
    for scenario in ALL:
        if not scenario.kind:
            assert not scenario.action, scenario.name
            continue
        info = KINDS[Kind(scenario.kind)]
        # It is a restart that hangs: what was asked for goes on, whatever the kind's own action is.
        expected = Action.RESTART if scenario.do == "stop" else info.by_kind
        assert scenario.action == expected, scenario.name
        if scenario.name.startswith("k"):
            assert info.code == scenario.code, scenario.name
        assert info.by_kind is not Action.OBSERVE


def test_the_subset_names_programs_that_exist() -> None:
    """A program that was renamed must not leave CI unseen."""
    assert set(SUBSET) <= {s.name for s in ALL}


def test_programs_know_only_the_heartbeat() -> None:
    """What a scenario may import of the project is the library that any engine may import."""
    for path in PROGRAMS.glob("*.py"):
        lines = [x for x in path.read_text().splitlines() if "stallwatch" in x and "import" in x]
        assert set(lines) <= {"from stallwatch import heartbeat"}, path.name
