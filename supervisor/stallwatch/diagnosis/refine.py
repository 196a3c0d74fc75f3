"""The final verdict, from the one that the clients were told and a later one. Pure."""

from __future__ import annotations

from dataclasses import replace

from stallwatch.diagnosis import describe
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.verdict import Verdict

HOST_WAIT = "not a device wait"


def refine(first: Verdict, second: Verdict) -> Verdict:
    """The final verdict: a later look may name what was unknown; it never contradicts a name.

    The clients were told `first`. Where the later evidence disagrees with a name that was given, the
    name stays with low confidence and the disagreement is among the reasons.
    """
    same_place = first.culprit.address in ("", second.culprit.address)
    if first.kind is Kind.UNKNOWN_STALL:
        if same_place or not second.culprit.address:
            return second
        # A named culprit is a claim too: the kind may be learnt, the person accused stays.
        note = f"a later look pointed at {second.culprit.address} ({second.kind})"
        return replace(first, reasons=(*first.reasons, describe.clean(note)))
    if second.kind is first.kind and same_place:
        return replace(second, edges=first.edges or second.edges)
    kinds = tuple(dict.fromkeys((first.kind, *first.kinds, second.kind, *second.kinds)))
    if second.kind is Kind.UNKNOWN_STALL and not _denies(second):
        return replace(first, kinds=kinds)
    note = f"a later look said {second.kind} in {second.culprit.address or 'nobody in particular'}"
    reasons = (*first.reasons, describe.clean(note), *second.reasons)
    return replace(first, confidence="low", kinds=kinds, reasons=reasons)


def _denies(verdict: Verdict) -> bool:
    return any(r.startswith(HOST_WAIT) for r in verdict.reasons)
