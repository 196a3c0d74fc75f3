"""What a configuration may say and probably does not mean. Remarks, never errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stallwatch.config.model import Config

# Any name may be a phase's. With less, `prefault`, a phase of our own engine, would be `default`.
_ALIKE = 0.81


def near_misses(config: Config) -> list[str]:
    """Keys of [engines.NAME.limits] that look like a slip, each in one sentence."""
    known = _known()
    return [
        f"[engines.{engine}.limits] {key!r} limits phases of that name only: did you mean {near!r}?"
        for engine, settings in config.engines.items()
        for key in settings.limits
        if key not in known and (near := _near(key, known))
    ]


def _near(key: str, known: Sequence[str]) -> str:
    plain = key.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(plain, known, n=1, cutoff=_ALIKE)), "")


def _known() -> tuple[str, ...]:
    """The table's own keys first, then the phases that diagnosis knows."""
    # Here, not above: the daemon's rooms read their configuration from this one.
    from stallwatch.diagnosis.vocabulary import DEFAULT  # noqa: PLC0415
    from stallwatch.watch.limits import FIELDS  # noqa: PLC0415
    from stallwatch.watch.policy import DEFAULT_PHASE_LIMITS  # noqa: PLC0415

    phases = DEFAULT.device_phases | DEFAULT.copy_phases | DEFAULT.send_phases
    names = (*FIELDS, *DEFAULT_PHASE_LIMITS, *sorted(phases | DEFAULT.host_phases))
    return tuple(dict.fromkeys(names))
