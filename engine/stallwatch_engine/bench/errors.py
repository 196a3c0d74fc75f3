"""What is wrong with a run before it begins. Named by who must act: whoever asked for it."""

from __future__ import annotations


class PlanRefused(ValueError):
    """The prompts, arrivals, limits or gates cannot be meant: change what `what` names.

    what: the flag, field or file line. hint: what to write instead.
    """

    def __init__(self, what: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{what}: {message}" + (f"; {hint}" if hint else ""))
        self.what = what
        self.message = message
        self.hint = hint


class TargetUnusable(Exception):
    """The server answers, or fails to answer, in a way that no run can begin with: look at `url`."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(f"{url}: {message}")
        self.url = url
        self.message = message
