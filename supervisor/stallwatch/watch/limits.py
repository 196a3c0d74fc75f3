"""From configured durations to a Policy. NaN, infinity, zero and negative limits are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from stallwatch.errors import ConfigError
from stallwatch.watch.policy import DEFAULT_PHASE_LIMITS, Policy

# Keys of [engines.NAME.limits] that are no phase names, and the Policy field each one sets.
FIELDS: Mapping[str, str] = {
    "default": "default_ns",
    "start": "start_ns",
    "start_silence": "start_silence_ns",
    "no_progress": "no_progress_ns",
    "degraded": "degraded_ns",
    "debugger": "debugger_ns",
    "pause_cap": "pause_cap_ns",
}
# What each of them, and each phase with a default of its own, limits (docs/configuration.md).
MEANINGS: Mapping[str, str] = {
    "default": "Every working or waiting phase without a limit of its own. Under vLLM's own 300 s, "
    "so that our verdict carries the name",
    "start": "The whole start, and each phase of it",
    "start_silence": "A start in which nothing moves: no memory growth, no bytes read, no child "
    "computing, no work",
    "no_progress": "Work is pending and no step completes",
    "degraded": "Three windows of this length in a row with a tenth of the usual work and movement: "
    "an alert, never a restart",
    "debugger": "A debugger that traces a process suspends its limits at most so long",
    "pause_cap": "A pause that a process declared raises its limits at most so long",
    "prefill": "Phases of this name; more for many tokens, see below",
    "compile": "Phases of this name, and the first 5 steps after a start",
    "loop": "Phases of this name: an event loop's own beat",
}
LONGEST_S = 10 * 365 * 86400.0


def build(limits: Mapping[str, float], *, base: Policy | None = None, where: str = "") -> Policy:
    """The policy for configured limits in seconds, by phase name or by a key of FIELDS.

    Raises ConfigError for a limit that could never fire or always would: a NaN compares false with
    everything and would switch the net off silently (seen in vllm-omni).
    """
    fields: dict[str, int] = {}
    phases: dict[str, int] = {}
    for name, seconds in limits.items():
        ns = _ns(name, seconds, where)
        if name in FIELDS:
            fields[FIELDS[name]] = ns
        else:
            phases[name] = ns
    values: dict[str, object] = {**fields, "phases": phases}
    return replace(base or Policy(), **values)  # type: ignore[arg-type]  # keys come from FIELDS


def with_learned(policy: Policy, learned: Mapping[str, int]) -> Policy:
    """The same policy with learned limits (ns by phase name); they rank below configured ones.

    A phase with a default of its own (prefill, compile) keeps it as the floor: a thousand short
    prompts say nothing about a long one.
    """
    floors = DEFAULT_PHASE_LIMITS
    return replace(policy, learned={n: max(ns, floors.get(n, 0)) for n, ns in learned.items()})


def _ns(name: str, seconds: float, where: str) -> int:
    good = not isinstance(seconds, bool) and math.isfinite(seconds) and 0 < seconds <= LONGEST_S
    if not good:
        raise ConfigError(
            f"limit {name!r} is {seconds!r}: it must be finite and greater than zero",
            where=where,
            hint='Write a duration such as "60s", or leave the key out for the default.',
        )
    return max(1, int(seconds * 1e9))
