"""An engine's output on our terminal: colours may pass, nothing else may drive the terminal. Pure."""

from __future__ import annotations

import re

# Possessive, so that hostile bytes cost linear time. Whole sequences first: a CSI that only sets colours stays, every other CSI, OSC, DCS, ... goes.
_SEQUENCE = re.compile(
    rb"(\x1b\[[0-9;:]{0,32}+m)"
    rb"|\x1b\[[0-?]{0,32}+[ -/]{0,4}+[@-~]"
    rb"|\x1b[\]P^_X][^\x07\x1b]{0,1024}+(?:\x07|\x1b\\)"
    rb"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]++|\x1b"
    rb"|\xc2[\x80-\x9f]"  # C1 controls
    rb"|\xe2(?:\x80[\x8e\x8f\xaa-\xae]|\x81[\xa6-\xa9])"  # marks and overrides of direction
)


def tame(data: bytes) -> bytes:
    """The bytes without terminal control but for colours, tabs and line ends.

    A sequence that is cut in two by the end of a chunk loses its escape, and the rest is text.
    """
    return _SEQUENCE.sub(lambda found: found[1] or b"", data)
