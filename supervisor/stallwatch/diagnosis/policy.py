"""What is done about a kind: enforce mode first, restart policy second. A total function."""

from __future__ import annotations

from stallwatch.diagnosis.kinds import KINDS, Action, Kind


def action_for(kind: Kind, enforce: str, policy: str) -> Action:
    """The action for a verdict under enforce = observe|fail|restart and policy = by-kind|always|never.

    observe never acts. fail never restarts. A kind whose own action is to alert (a pause, mere
    slowness) fails nobody under by-kind and never; under always it is restarted like all others.
    Unknown words raise ValueError: configuration was to refuse them.
    """
    if enforce not in ("observe", "fail", "restart"):
        raise ValueError(f"enforce is {enforce!r}, not observe, fail or restart")
    if policy not in ("by-kind", "always", "never"):
        raise ValueError(f"restart policy is {policy!r}, not by-kind, always or never")
    if enforce == "observe":
        return Action.OBSERVE
    wanted = Action.RESTART if policy == "always" else KINDS[kind].by_kind
    if wanted is Action.ALERT:
        return Action.ALERT
    if enforce == "fail" or policy == "never":
        return Action.FAIL
    return wanted
