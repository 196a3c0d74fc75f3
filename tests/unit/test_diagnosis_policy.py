"""What is done about a kind, in every combination."""

from __future__ import annotations

import itertools

import pytest

from stallwatch.diagnosis.kinds import KINDS, Action, Kind
from stallwatch.diagnosis.policy import action_for

ENFORCE, POLICY = ("observe", "fail", "restart"), ("by-kind", "always", "never")


@pytest.mark.parametrize(("enforce", "policy"), list(itertools.product(ENFORCE, POLICY)))
def test_every_kind_has_an_action(enforce: str, policy: str) -> None:
    """The table is total; only restart mode restarts, never refuses to, observe only observes."""
    for kind in Kind:
        action = action_for(kind, enforce, policy)
        if enforce == "observe":
            assert action is Action.OBSERVE
        if action is Action.RESTART:
            assert enforce == "restart"
            assert policy != "never"


@pytest.mark.parametrize(
    ("kind", "policy", "action"),
    [
        (Kind.DEVICE_WAIT, "by-kind", Action.RESTART),
        (Kind.DEVICE_WAIT, "never", Action.FAIL),
        (Kind.STALE_LOCK_FILE, "by-kind", Action.FAIL),
        (Kind.STALE_LOCK_FILE, "always", Action.RESTART),
        (Kind.PAUSED_TOO_LONG, "by-kind", Action.ALERT),
        (Kind.PAUSED_TOO_LONG, "never", Action.ALERT),
        (Kind.DEGRADED, "by-kind", Action.ALERT),
    ],
)
def test_what_restart_mode_does(kind: Kind, policy: str, action: Action) -> None:
    """Kinds that a restart does not cure are failed or reported, unless always was asked for."""
    assert action_for(kind, "restart", policy) is action


def test_by_kind_is_the_table() -> None:
    """Under restart and by-kind the action is what the kind's page says."""
    assert all(action_for(k, "restart", "by-kind") is KINDS[k].by_kind for k in Kind)


@pytest.mark.parametrize(("enforce", "policy"), [("kill", "always"), ("fail", "sometimes")])
def test_unknown_words_are_refused(enforce: str, policy: str) -> None:
    """A word that configuration should have refused raises, it does not act."""
    with pytest.raises(ValueError, match="not"):
        action_for(Kind.GIL_HELD, enforce, policy)
