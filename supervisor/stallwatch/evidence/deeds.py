"""What was done about a stall and what to do next, as a stored report tells it. Pure.

Only the timeline says what happened; the action says what was intended. A report is kept several
times, so what is not in it yet is said to be missing, never assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stallwatch.diagnosis.kinds import KINDS, SIGNALS, Kind

FURTHER = "further stacks"  # begins the timeline's word that the evidence is whole

_KILLED = re.compile(r"\b(\d+) processes? killed")
_ONE = re.compile(r"\b1 ((?:more |shared memory )?)(processes|sets|files)\b")
_SINGULAR = {"processes": "process", "sets": "set", "files": "file"}
_SIGNAL = re.compile(r"signal (\d+)")
_STATUS = re.compile(r"exit status (-?\d+)")
_GATEWAY = re.compile(r"the gateway (answered|held) (\d+ requests?)")
_NOBODY = "No client was waiting."
_GONE = "Nobody was left to answer the clients: their front end was gone."
_IDLE = {
    "observe": "Nothing was done about it: this engine is only observed.",
    "alert": "Nothing was done about it: this kind is only reported.",
}


def singular(text: str) -> str:
    """'1 processes killed' as '1 process killed'."""
    return _ONE.sub(lambda m: f"1 {m[1]}{_SINGULAR[m[2]]}", text)


def sentences(report: Mapping[str, Any]) -> Iterator[str]:
    """What happened, in a few sentences: clients, processes, what follows."""
    action, texts = str(report.get("action")), timeline(report)
    if action in _IDLE:
        yield _IDLE[action]
        if any(t == "it moves again" for t in texts):
            yield "It moved again by itself."
    elif action in ("fail", "restart"):
        yield from filter(None, (*_clients(texts), _processes(texts), _follows(report, texts)))
    else:
        yield f"Action: {report.get('action') or 'not known'}."
    if action != "alert" and _unfinished(texts):
        # A stored report does not know whether its supervisor lived on.
        yield "The rest of the evidence is being collected, unless the supervisor ended first."
    requests = report.get("requests")
    if isinstance(requests, Mapping) and requests.get("in_flight"):
        yield f"Requests in flight: {requests['in_flight']}."


def timeline(report: Mapping[str, Any]) -> list[str]:
    """The texts of the timeline, in its order."""
    steps = report.get("timeline")
    found = steps if isinstance(steps, list) else []
    return [str(s.get("text", "")) for s in found if isinstance(s, Mapping)]


def _unfinished(texts: Sequence[str]) -> bool:
    return bool(texts) and not any(
        t.startswith((FURTHER, "tree gone")) or _survived(t) for t in texts
    )


def _survived(text: str) -> bool:
    return "survived SIGKILL" in text


def gateway_words(held: int, told: int) -> str:
    """What gateways held of an engine, and how many of those they answered, for the timeline."""
    if told:
        return f"the gateway answered {_requests(told)} with the failure"
    return f"the gateway held {_requests(held)} and has not said how they ended"


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _clients(texts: Sequence[str]) -> tuple[str, ...]:
    """The front end's own clients, then those of a gateway before it."""
    found = next(filter(None, map(_GATEWAY.match, texts)), None)
    if found is None:
        return (_of_engine(texts) or "Whether clients were answered is not recorded.",)
    said = f"The gateway answered {found[2]} with the failure."
    if found[1] == "held":
        said = f"The gateway held {found[2]}: this report does not know the outcome."
    own = _of_engine(texts)
    # What is said of an engine alone is not true of a gateway's clients.
    instead = {_NOBODY: "", _GONE: "The engine's own front end was gone."}
    return (instead.get(own, own), said)


def _of_engine(texts: Sequence[str]) -> str:
    told = {
        "no client was waiting": _NOBODY,
        "every waiting client answered": "Every waiting client was answered with the failure.",
        "some clients could not": "Not every waiting client could be answered by the engine.",
        "the front end is gone": _GONE,
    }
    for text in texts:
        for begin, sentence in told.items():
            if text.startswith(begin):
                return sentence
    return ""


def _processes(texts: Sequence[str]) -> str:
    for text in reversed(texts):
        if _survived(text):
            return "A process survived SIGKILL: the engine is not gone."
        if not text.startswith("tree gone"):
            continue
        found = _KILLED.search(text)
        if found is None:
            return f"Its processes are gone: {text.partition(':')[2].strip() or 'all ended'}."
        if int(found[1]) == 0:
            return "No process was left to kill."
        return "1 process was killed." if found[1] == "1" else f"{found[1]} processes were killed."
    return "The end of its processes is not recorded."


def _follows(report: Mapping[str, Any], texts: Sequence[str]) -> str:
    if stop_was_asked(report):
        return "A stop had been asked for: this report promises no restart."
    if report.get("action") == "fail":
        return "It is not restarted: the action is fail."
    if any(_survived(t) for t in texts):
        return "Nothing is started beside a process that lives."
    return (
        "Its action is a restart within the budget: `stallwatch status` says whether it happened."
    )


def stop_was_asked(report: Mapping[str, Any]) -> bool:
    """Somebody had asked the engine to stop before or while it was judged."""
    host = report.get("host")
    rule = host.get("rule") if isinstance(host, Mapping) else ""
    return (
        report.get("kind") == Kind.SHUTDOWN_HANG
        or rule == "shutdown-hang"
        or any("grace over" in t or "it stopped by itself" in t for t in timeline(report))
    )


def advice(report: Mapping[str, Any]) -> Iterator[str]:
    """What to do next: the kind's advice, as far as this report's facts bear it."""
    kind = str(report.get("kind", ""))
    if kind not in KINDS:
        return
    said = KINDS[Kind(kind)].advice
    if kind == Kind.CHILD_DIED:
        said = _of_exit(exit_words(report))
    elif kind == Kind.DEVICE_WAIT and report.get("confidence") == "low":
        said = KINDS[Kind.UNKNOWN_STALL].advice
    elif kind == Kind.PROCESS_STOPPED and report.get("action") not in ("restart", "observe"):
        said = said.partition(";")[0] + "."
    ident = str(report.get("id") or "ID")
    said = said.replace("`stallwatch dump ID`", f"`stallwatch dump {ident}`")
    culprit = report.get("culprit")
    if isinstance(culprit, Mapping) and not (culprit.get("pid") or culprit.get("process")):
        said = said.replace("the culprit's stack", "the merged stacks")
    yield said


def exit_words(report: Mapping[str, Any]) -> str:
    """How the culprit ended, in the words of the report; '' when it does not say."""
    culprit, rows = report.get("culprit"), report.get("processes")
    pid = culprit.get("pid") if isinstance(culprit, Mapping) else None
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and pid and row.get("pid") == pid:
            return str(row.get("exit") or "")
    return ""


def _of_exit(words: str) -> str:
    if (found := _SIGNAL.match(words)) is not None:
        usual = SIGNALS.get(int(found[1][:4]), "")
        if "out of memory" in words:
            usual = "the kernel ended it for want of memory"
        return f"Signal {found[1]}: {usual}." if usual else f"Find who sent signal {found[1]}."
    if (found := _STATUS.match(words)) is not None:
        return f"The log tail says why; status {found[1]}."
    return "How it ended is not known; the log tail may say why."
