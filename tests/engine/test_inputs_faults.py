"""Faults on purpose need a switch, and a name that exists."""

from __future__ import annotations

import pytest

from stallwatch_engine.faults import SWITCH, VARIABLE, Fault, Faults, FaultsRefused


def test_no_variable_means_no_fault():
    """Production: nothing is ever hit."""
    faults = Faults.from_environment({})
    assert faults.hit("offload.kill", 3) is None
    assert faults.event("inputs") == ""


@pytest.mark.parametrize("switch", [None, "", "0", "true"])
def test_faults_without_the_switch_are_refused(switch):
    """A variable left over must neither break an engine nor be ignored in silence."""
    environment = {VARIABLE: "offload.kill"} | ({SWITCH: switch} if switch is not None else {})
    with pytest.raises(FaultsRefused, match="for tests"):
        Faults.from_environment(environment)


def test_faults_are_read_with_step_and_milliseconds():
    """NAME, NAME@SEQ, NAME=MS and both, comma separated."""
    text = "offload.slow@3=250, event.late@inputs=1.5,offload.kill"
    faults = Faults.from_environment({SWITCH: "1", VARIABLE: text})
    assert faults.hit("offload.slow", 3) == Fault("offload.slow", "3", 250.0)
    assert faults.hit("offload.slow", 4) is None
    assert faults.hit("offload.kill", 99) is not None
    assert (faults.event("inputs"), faults.event("output")) == ("late", "")
    assert faults.late_s == 0.0015


@pytest.mark.parametrize("text", ["offload.explode", "offload.kill@", "x", ",", "offload.kill=-1"])
def test_an_unknown_fault_is_refused(text):
    """A misspelt fault would make a test pass that tested nothing."""
    with pytest.raises(FaultsRefused, match="known: "):
        Faults.from_environment({SWITCH: "1", VARIABLE: text})
