"""A report as lines for a person: what happened first, what to do next before the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stallwatch.diagnosis.kinds import KINDS, Kind
from stallwatch.evidence import deeds, logtail, stackview, waits
from stallwatch.evidence.clean import clean

_LOG_LINES = 20
_STACK_LINES = 40
# What the elapsed time and its limit are about (describe.measured): label, middle, limit's name.
_TIMES = {
    "silence": ("silence", "", "limit"),
    "no work finished": ("waiting", " without finished work", "limit"),
    "stopped": ("stopped", "", "told after"),
    "paused": ("paused", "", "lease"),
    "since the stop was asked for": ("stopping", " since the stop was asked for", "grace"),
    "whole start": ("starting", " for the whole start", "limit"),
    "silence of the start": ("silence", " of the start", "limit"),
}
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waits in the kernel",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "ended, not reaped",
    "I": "idle",
}
# No frame can exist: the process or its thread is gone, or the matter is a lease.
_FRAMELESS = (Kind.CHILD_DIED, Kind.THREAD_DIED, Kind.PAUSED_TOO_LONG)


def render(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines without line ends and without control characters, whatever the report holds."""
    for line in _sections(report):
        yield clean(line, 400)


def render_live(found: Mapping[str, Any]) -> Iterator[str]:
    """Stacks taken on request (report.live) as lines."""
    for process in _dicts(found, "processes"):
        yield clean(_process(process), 400)
    for line in stackview.lines(_dict(found, "stack_tree")):
        yield clean(line, 400)
    for line in _unknown_processes(found):
        yield clean(line, 400)


def _sections(report: Mapping[str, Any]) -> Iterator[str]:
    culprit = _dict(report, "culprit")
    yield str(report.get("summary") or "A stall, and no sentence for it.")
    yield from _head(report, culprit)
    yield from _titled("What every process was doing", _doing(report))
    yield from _titled("Who waits for whom", waits.lines(report))
    merged = stackview.lines(_dict(report, "stack_tree"), culprit, _STACK_LINES)
    yield from _titled("Stacks, merged", merged)
    yield from _titled("Why we say so", _reasons(report))
    yield from _titled("Device", _gpu(report))
    yield from _titled("Last log lines", _logs(report))
    yield from _titled("What was done", _done(report))
    yield from _titled("What to do next", _next(report))
    yield from _titled("What is not known", _unknown(report, culprit))


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    for i, line in enumerate(lines):
        if i == 0:
            yield ""
            yield title
        yield f"  {line}"


def _head(report: Mapping[str, Any], culprit: Mapping[str, Any]) -> Iterator[str]:
    kind = str(report.get("kind", ""))
    yield ""
    yield f"id        {report.get('id', '')}  (engine {report.get('engine', '')}, incarnation {report.get('incarnation', '')})"
    meaning = f": {KINDS[Kind(kind)].meaning}" if kind in KINDS else ""
    yield f"kind      {kind}{meaning} ({report.get('confidence', '?')} confidence)"
    others = [str(k) for k in _list(report, "kinds") if k != kind]
    if others:
        yield f"          could also be {', '.join(others)}"
    yield f"culprit   {_who(culprit, report)}"
    for key in ("phase", "thread", "frame"):
        if culprit.get(key):
            lease = key == "thread" and kind == Kind.PAUSED_TOO_LONG
            yield f"{'lease' if lease else key:<9} {culprit[key]}"
    yield from _time(report)
    yield f"detected  {report.get('detected_at', '')}"
    yield f"evidence  {report.get('rung', 'none')}"


def _time(report: Mapping[str, Any]) -> Iterator[str]:
    """How long, of what, against which limit; nothing for an event, which took no time."""
    measured = _dict(report, "host").get("measured")
    if measured == "" or not (report.get("elapsed_s") or report.get("limit_s")):
        return
    label, middle, limit = _TIMES.get(str(measured), _TIMES["silence"])
    yield f"{label:<9} {_s(report.get('elapsed_s'))}{middle}, {limit} {_s(report.get('limit_s'))}"


def _who(culprit: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    address, pid = culprit.get("lane") or culprit.get("process") or "", culprit.get("pid")
    if pid and address in ("", f"pid:{pid}"):
        rows = [p for p in _dicts(report, "processes") if p.get("pid") == pid]
        comm = rows[0].get("comm") if rows else ""
        return f"pid {pid} ({comm})" if comm else f"pid {pid}"
    if not address:
        return "not known"
    return f"{address} (pid {pid})" if pid else str(address)


def _doing(report: Mapping[str, Any]) -> Iterator[str]:
    for process in _dicts(report, "processes"):
        yield _process(process)
        for lane in _dicts(process, "lanes"):
            last = "last: " if process.get("exit") or process.get("state") in ("X", "gone") else ""
            yield f"  {last}{_lane(lane)}"
        for stack in _dicts(report, "stacks"):
            if stack.get("pid") == process.get("pid") and stack.get("sample") == 0:
                for thread in _dicts(stack, "threads"):
                    if thread.get("owns_gil"):
                        yield f"  the GIL is held by {_thread(thread)}"


def _process(process: Mapping[str, Any]) -> str:
    end = f": ended, {process['exit']}" if process.get("exit") else ""
    facts = _dict(process, "facts")
    wchan = f", in {facts['wchan']}" if facts.get("wchan") else ""
    address = str(process.get("address") or "?")
    pid = "" if address.startswith("pid:") else f"  pid {process.get('pid', '?')}"
    state = str(process.get("state") or "?")
    words = f" ({_STATES[state]})" if state in _STATES else ""
    return f"{address}{pid}, state {state}{words}{wchan}{end}"


def _thread(thread: Mapping[str, Any]) -> str:
    frames = _list(thread, "frames")
    where = f" in {frames[0]}" if frames else ""
    return f"{thread.get('name') or 'thread'} (tid {thread.get('tid', '?')}){where}"


def _lane(lane: Mapping[str, Any]) -> str:
    limit = f" of {_s(lane['limit_s'])}" if lane.get("limit_s") else ""
    cls, phase = lane.get("class", "?"), lane.get("phase", "?")
    parts = [
        f"{lane.get('address', '?')}: {phase if cls == phase else f'{cls} {phase}'}",
        f"for {_s(lane.get('age_s'))}{limit}",
        f"beats {lane.get('beats', 0)}, work {lane.get('work', 0)}",
    ]
    parts += [f"{name} {value}" for name, value in _dict(lane, "details").items()]
    parts += [f"inside {outer.get('phase', '?')}" for outer in _dicts(lane, "outer")]
    if lane.get("wait_on"):
        parts.append(f"waits for {lane['wait_on']}")
    if lane.get("text"):
        parts.append(str(lane["text"]))
    if lane.get("torn"):
        parts.append("stopped inside an update")
    return ", ".join(parts)


def _reasons(report: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(reason) for reason in _list(_dict(report, "wait_graph"), "reasons"))
    yield from (str(witness) for witness in _list(_dict(report, "host"), "witnesses"))


def _gpu(report: Mapping[str, Any]) -> Iterator[str]:
    for device in _dicts(_dict(report, "gpu"), "devices"):
        yield ", ".join(f"{key} {value}" for key, value in list(device.items())[:12])


def _logs(report: Mapping[str, Any]) -> Iterator[str]:
    tail = [str(line) for line in _list(_dict(report, "logs"), "tail")]
    yield from list(logtail.collapse(tail))[-_LOG_LINES:]


def _done(report: Mapping[str, Any]) -> Iterator[str]:
    for step in _dicts(report, "timeline"):
        yield f"{_s(step.get('at_s')):>9}  {deeds.singular(str(step.get('text', '')))}"
    yield from deeds.sentences(report)


def _next(report: Mapping[str, Any]) -> Iterator[str]:
    yield from deeds.advice(report)
    if (kind := str(report.get("kind"))) in KINDS:
        yield f"`stallwatch explain {kind}` has the page of this kind."


def _unknown(report: Mapping[str, Any], culprit: Mapping[str, Any]) -> Iterator[str]:
    if report.get("kind") == Kind.UNKNOWN_STALL:
        yield "The kind: the evidence fits none well enough to name one."
    if _who(culprit, report) == "not known":
        yield "The culprit."
    elif not culprit.get("frame") and _has_frame(report, culprit):
        yield "The frame in which the culprit is."
    yield from _unknown_processes(report)
    gpu = _dict(report, "gpu")
    if not gpu.get("available"):
        yield f"The device's state: {gpu.get('why', 'not asked')}."


def _has_frame(report: Mapping[str, Any], culprit: Mapping[str, Any]) -> bool:
    """Whether one particular frame could be told. A stopped process is in as many as it has threads."""
    kind = report.get("kind")
    stacks = [s for s in _dicts(report, "stacks") if s.get("pid") == culprit.get("pid")]
    stopped = kind == Kind.PROCESS_STOPPED and any(s.get("threads") for s in stacks)
    return kind not in _FRAMELESS and not stopped


def _unknown_processes(report: Mapping[str, Any]) -> Iterator[str]:
    for process in _dicts(report, "processes"):
        for problem in _list(process, "problems"):
            yield f"{process.get('address', '?')}: {problem}"


def _s(value: object) -> str:
    return f"{value:.1f} s" if isinstance(value, int | float) else "? s"


def _dict(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = holder.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(holder: Mapping[str, Any], key: str) -> list[Any]:
    found = holder.get(key)
    return found if isinstance(found, list) else []


def _dicts(holder: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return [item for item in _list(holder, key) if isinstance(item, Mapping)]
