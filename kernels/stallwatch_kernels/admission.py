"""Which implementation of an op runs, and why: the first eligible one, unless the operator says otherwise.

An op lists its implementations in order of preference, each with the reason why it cannot take this call,
or None. The descriptor from which those reasons follow (dtype, shape, device) belongs to the op; nothing
here knows any. `STALLWATCH_KERNEL_<OP>` overrides the order, never the eligibility: an override that cannot
run is an error and not a silent fallback.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stallwatch_kernels.errors import KernelRefused

Candidate = tuple[str, str | None]
"""An implementation's name, and why it cannot take this call (None: it can)."""

log = logging.getLogger(__name__)

_PREFIX = "STALLWATCH_KERNEL_"
_LOGGED_AT_MOST = 1024
_logged: set[Choice] = set()


class NoImplementation(KernelRefused):
    """Every implementation of the op refused the call. Its message holds each reason."""


class BadOverride(KernelRefused):
    """`STALLWATCH_KERNEL_<OP>` names an implementation that does not exist or cannot take this call."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that runs, and the reason, in words for an operator."""

    op: str
    impl: str
    reason: str


def override_name(op: str) -> str:
    """The environment variable that overrides `op`: `page4-attention` -> STALLWATCH_KERNEL_PAGE4_ATTENTION."""
    return _PREFIX + "".join(c if c.isalnum() else "_" for c in op).upper()


def choose(
    op: str, candidates: Sequence[Candidate], *, environ: Mapping[str, str] = os.environ
) -> Choice:
    """The first candidate without a refusal, or the one that the environment names.

    Each distinct choice is logged once (INFO), so a reason should hold for many calls: a class of the
    shape and not the shape itself. Raises NoImplementation or BadOverride.
    """
    wanted = environ.get(override_name(op), "")
    choice = _overridden(op, wanted, candidates) if wanted else _preferred(op, candidates)
    _log_once(choice)
    return choice


def _preferred(op: str, candidates: Sequence[Candidate]) -> Choice:
    refused: list[str] = []
    for impl, refusal in candidates:
        if refusal is None:
            why = "; ".join(refused)
            return Choice(op, impl, f"not {why}" if why else "preferred and eligible")
        refused.append(f"{impl}: {refusal}")
    problem = "; ".join(refused) or "none exists"
    raise NoImplementation(op, "implementation", f"is missing for this call: {problem}")


def _overridden(op: str, wanted: str, candidates: Sequence[Candidate]) -> Choice:
    variable = override_name(op)
    known = ", ".join(
        impl if refusal is None else f"{impl} (not here: {refusal})" for impl, refusal in candidates
    )
    for impl, refusal in candidates:
        if impl != wanted:
            continue
        if refusal is not None:
            raise BadOverride(
                op, variable, f"= {wanted!r} cannot take this call: {refusal}; choices: {known}"
            )
        return Choice(op, impl, f"{variable} says so")
    raise BadOverride(op, variable, f"= {wanted!r} is no implementation; choices: {known}")


def _log_once(choice: Choice) -> None:
    if choice in _logged:
        return
    if len(_logged) >= _LOGGED_AT_MOST:  # repeating a line is better than growing for ever
        _logged.clear()
    _logged.add(choice)
    log.info("kernel %s: %s (%s)", choice.op, choice.impl, choice.reason)
