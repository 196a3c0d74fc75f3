"""A kind of stall as a page for a person, in plain text and in Markdown. Pure, from the data of kinds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from stallwatch.diagnosis.kinds import KINDS, Action, Kind, Remedy

WIDTH = 80

_REMEDIES: Mapping[Remedy, str] = {
    Remedy.RESTART: "a restart of the engine, at once and within its budget",
    Remedy.GROUP: "a restart of all ranks together: one alone would leave its peers waiting",
    Remedy.KILL: "SIGKILL and a restart: no signal handler can run, and no polite stop helps",
    Remedy.FINISH: "SIGKILL ends the stop; the engine starts again only if a restart was asked for",
    Remedy.DRAIN: "somebody must read what it writes: a restart only buys time",
    Remedy.FRONT_END: "a restart of the front end; here front end and engine end together",
    Remedy.RESUME: "whoever declared the pause must end it",
    Remedy.REPORT: "nothing is to be done to the engine",
    Remedy.MEND_FIRST: "somebody must mend the cause first: a restart does not help, or makes it worse",
}
_ACTIONS: Mapping[Action, str] = {
    Action.RESTART: "clients are failed, the process tree is killed, the engine is restarted",
    Action.FAIL: "clients are failed, the process tree is killed, nothing is restarted",
    Action.ALERT: "it is reported; clients are not failed and nothing is killed",
    Action.OBSERVE: "it is reported only",
}


def fields(kind: Kind) -> Iterator[tuple[str, str]]:
    """(label, sentence) of one kind, in reading order."""
    info = KINDS[kind]
    yield "means", _sentence(info.meaning)
    yield "culprit", _sentence(info.culprit)
    yield "cure", _sentence(_REMEDIES[info.remedy])
    yield "by default", _sentence(_ACTIONS[info.by_kind])
    yield "next", info.advice


def as_json(kind: Kind) -> dict[str, str]:
    """The page as data; keys are stable."""
    info = KINDS[kind]
    return {
        "kind": str(kind),
        "code": info.code,
        "meaning": info.meaning,
        "culprit": info.culprit,
        "remedy": str(info.remedy),
        "action": str(info.by_kind),
        "advice": info.advice,
    }


def lines(kind: Kind) -> Iterator[str]:
    """The page for a terminal of 80 columns."""
    code = KINDS[kind].code
    yield f"{kind}  ({code})" if code else str(kind)
    yield ""
    for label, text in fields(kind):
        head = f"{label:<12}"
        yield from textwrap.wrap(
            text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
        )


def markdown() -> str:
    """docs/kinds.md, whole."""
    return "\n".join(_markdown()) + "\n"


def _markdown() -> Iterator[str]:
    yield "# Kinds of stall"
    yield ""
    yield (
        "Generated from `stallwatch.diagnosis.kinds` by `scripts/make_docs.py`: change the data, not "
        "this page. `stallwatch explain KIND` prints one of them."
    )
    yield ""
    yield (
        'The action is that of `restart.policy = "by-kind"` with `enforce = "restart"`; '
        "`docs/configuration.md` has the other settings."
    )
    yield ""
    yield "| code | kind | means | action |"
    yield "|---|---|---|---|"
    for kind, info in KINDS.items():
        yield f"| {info.code} | [{kind}](#{str(kind).lower()}) | {info.meaning} | {info.by_kind} |"
    for kind in KINDS:
        yield ""
        yield f"## {kind}"
        yield ""
        for label, text in fields(kind):
            yield f"- **{label}**: {text}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
