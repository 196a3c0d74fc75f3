"""`status` and `describe`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from stallwatch.cli.client import client, segment
from stallwatch.cli.events import all_events
from stallwatch.cli.output import age, clean, cut, fields, out, out_json, say, since, table
from stallwatch.cli.settings import HELP, common, settings

_BROKEN = ("unkillable", "exhausted", "failed", "stalled")
_GIVEN_UP = ("unkillable", "exhausted", "failed")
_RECENT = 5
_REPORTS = "[-]reports failed: "  # the line of /healthz?verbose
NO_LANES = (
    "no lanes: this engine sends no heartbeats; only exits and stopped processes are seen"
    " (docs/heartbeat.md)"
)
# The shell's words, which /healthz says too.
_WORDS = {
    "starting": "loading",
    "backoff": "restarting",
    "suspect": "ready",
    "stopping": "draining",
}


def short(stall_id: str) -> str:
    """The last eight digits name a stall well enough for a table and for `show`."""
    return stall_id.rpartition("-")[2]


def culprit_of(stall: dict[str, Any]) -> str:
    culprit = stall.get("culprit") or ""
    if isinstance(culprit, dict):
        return str(culprit.get("lane") or culprit.get("process") or "")
    return str(culprit)


def headline(engines: list[dict[str, Any]]) -> str:
    """One sentence that says how things are."""
    for state in _BROKEN:
        for each in engines:
            if each["state"] == state:
                why = each.get("exhausted_reason") or each.get("reason")
                return f"{each['name']} is {state.upper()}" + (f": {why}" if why else ".")
    if not engines:
        return "No engines."
    counts: dict[str, int] = {}
    for each in engines:
        word = _WORDS.get(each["state"], each["state"])
        counts[word] = counts.get(word, 0) + 1
    if len(engines) == 1:
        return f"{engines[0]['name']} is {next(iter(counts))}."
    listed = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"{len(engines)} engines: {listed}."


def _hint(engines: list[dict[str, Any]], stalls: list[dict[str, Any]]) -> str:
    for each in engines:
        if each["state"] in _GIVEN_UP:
            return _coming(each) if each.get("comes_back") else _given_up(each)
    for each in engines:
        if each["state"] == "backoff":
            return _coming(each)
    if stalls:
        return f"stallwatch show {short(stalls[0]['id'])} prints the report"
    return "stallwatch describe NAME shows lanes and processes"


def _given_up(engine: dict[str, Any]) -> str:
    """What an operator does about an engine that is not started again by itself."""
    name, last = engine["name"], engine["last_stall"]
    if engine["state"] == "unkillable":
        return (
            f"end what survives SIGKILL (stallwatch describe {name} names it; it may take a reset or "
            f"a reboot), then stallwatch restart {name}"
        )
    if engine["state"] == "failed" and engine["up"]:
        return f"it is being ended; stallwatch events {name} tells how that goes"
    cause = f"stallwatch show {short(last)}" if last else f"stallwatch logs {name}"
    return f"find the cause ({cause}), mend it, then stallwatch restart {name} starts it again"


def _coming(engine: dict[str, Any]) -> str:
    """When an engine starts again that needs nobody for it."""
    name, last = engine["name"], engine["last_stall"]
    cause = f"; stallwatch show {short(last)} prints the cause" if last else ""
    if engine["state"] != "backoff":
        return f"{name} is being ended, then it is started again by itself{cause}"
    when = age(engine["backoff_s"])
    return f"{name} is started again by itself in {when}, with stallwatch restart {name} now{cause}"


def _waiting(engines: list[dict[str, Any]]) -> list[str]:
    """What engines on their way to READY wait for, one line for each."""
    found = []
    for each in engines:
        if each["state"] in ("backoff", "starting") and each["reason"]:
            backoff = each["state"] == "backoff"
            verb = f"restarts in {age(each['backoff_s'])}" if backoff else "is starting"
            found.append(f"{each['name']} {verb}: {each['reason']}")
    return found


def stall_table(stalls: list[dict[str, Any]], *, wide: bool = False) -> None:
    rows = [
        (s["id"], s["engine"], s["kind"], since(s.get("detected_at", "")), culprit_of(s))
        for s in stalls
    ]
    table(("ID", "ENGINE", "KIND", "AGE", "CULPRIT"), rows, fit=not wide)


def _engine_table(engines: list[dict[str, Any]], *, wide: bool) -> None:
    head = ["NAME", "STATE", "READY", "RESTARTS", "LAST-STALL", "PID", "AGE"]
    rows: list[list[object]] = []
    for each in engines:
        last = each["last_stall"]
        row: list[object] = [each["name"], each["state"], "yes" if each["ready"] else "no"]
        row += [f"{each['restarts_in_window']}/{each['budget']}", last if wide else short(last)]
        row += [each["root_pid"] or "-", age(each["age_s"])]
        if wide:
            row += [each["incarnation"], each["port"] or "-", each["enforce"], each["reason"]]
        rows.append(row)
    if wide:
        head += ["INCARNATION", "PORT", "ENFORCE", "REASON"]
    table(head, rows, fit=not wide)


@click.command(context_settings=HELP)
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="Exit 3 unless every engine shown is ready.")
@common()
def status(name: str | None, *, check: bool) -> int:
    """All engines at a glance, or one of them."""
    daemon = client()
    if name:
        engines = [daemon.get(f"/v1/engines/{segment(name)}")]
    else:
        engines = daemon.get("/v1/engines")["items"]
    stalls = daemon.get("/v1/stalls", limit=_RECENT, engine=name)["items"]
    code = 3 if check and not all(each["ready"] for each in engines) else 0
    if settings().json:
        out_json({"engines": engines, "stalls": stalls})
    elif settings().output == "name":
        for each in engines:
            out(clean(each["name"]))
    else:
        _show(engines, stalls)
        live, text = daemon.status("/livez?verbose")
        if live != 200:
            say("warning: the supervisor itself is not live:")
            say("".join(f"  {clean(line)}\n" for line in text.splitlines()).rstrip())
        _memory_only(daemon.status("/healthz?verbose")[1])
    daemon.close()
    return code


def _memory_only(health: str) -> None:
    """What is lost when this daemon ends, if the disk does not take its reports."""
    for line in health.splitlines():
        if line.startswith(_REPORTS):
            say(
                clean(
                    f"warning: reports are {line.removeprefix(_REPORTS)}: they end with the daemon"
                )
            )


def _doors(engines: list[dict[str, Any]]) -> list[str]:
    """Where clients connect, one line for each address."""
    found: dict[str, list[str]] = {}
    for each in engines:
        if each.get("clients") and each.get("role", "engine") == "engine":
            found.setdefault(each["clients"], []).append(each["name"])
    return [f"clients of {', '.join(names)} connect to {place}" for place, names in found.items()]


def _show(engines: list[dict[str, Any]], stalls: list[dict[str, Any]]) -> None:
    wide = settings().output == "wide"
    out(clean(headline(engines)))
    out()
    _engine_table(engines, wide=wide)
    for each in engines:
        if each["state"] in _BROKEN and each.get("top_frame"):
            out(f"  {clean(each['name'])} stood in {clean(each['top_frame'])}")
    for line in (*_waiting(engines), *_doors(engines)):
        out(f"  {clean(line)}")
    out()
    out("Recent stalls" if stalls else "Recent stalls: (none)")
    if stalls:
        stall_table(stalls, wide=wide)
    say("")
    say(_hint(engines, stalls))


@click.command(context_settings=HELP)
@click.argument("name")
@common()
def describe(name: str) -> None:
    """One engine: state, processes, lanes, recent events."""
    daemon = client()
    found = daemon.get(f"/v1/engines/{segment(name)}")
    if settings().json:
        out_json(found)
        return
    if settings().output == "name":
        out(clean(found["name"]))
        return
    wide = settings().output == "wide"
    happened = all_events(daemon, name)
    events = happened[-10:]
    ready = f", ready since {found['ready_at']}" if found["ready_at"] else ""
    budget = f"{found['restarts_in_window']} of {found['budget']} restarts used"
    backoff = f", next start in {age(found['backoff_s'])}" if found["backoff_s"] else ""
    fields(
        [
            ("Engine", found["name"]),
            ("State", f"{found['state']} for {age(found['age_s'])}{ready}"),
            ("Why", found["reason"]),
            ("Command", shlex.join(found["command"])),
            ("Incarnation", f"{found['incarnation']}, started {found['started_at'] or '-'}"),
            ("Root pid", f"{found['root_pid'] or '-'}, {found['members']} processes"),
            ("Port", found["port"] or "-"),
            ("Clients", found.get("clients", "")),
            ("Enforce", found["enforce"]),
            ("Budget", budget + backoff),
            ("Pause", _pause(happened)),
            ("Last stall", found["last_stall"]),
            ("Top frame", found["top_frame"]),
        ]
    )
    out()
    _processes(found["processes"])
    out()
    _lanes(found["lanes"], wide=wide)
    if found["ready"] and not found["lanes"]:
        out(NO_LANES)
    out()
    out("Events" if events else "Events: (none)")
    for event in events:
        line = f"  {clean(event['at'])}  {clean(event['type']):<10} {clean(event['message'])}"
        out(line if wide else cut(line))


def _pause(happened: list[dict[str, Any]]) -> str:
    """The lease on the limits that is running, or ''. Its end is an event as its begin is."""
    last = [e for e in happened if e["type"] == "paused"][-1:]
    if not last or "is over" in last[0]["message"]:
        return ""
    return f"{last[0]['message']} (at {last[0]['at']})"


def _processes(found: list[dict[str, Any]]) -> None:
    table(
        ("PROCESS", "PID", "STATE", "READY", "PENDING", "RSS", "COMM"),
        [
            (
                p["address"], p["pid"], p["state"], _ready(p),
                p["pending"] if p["attached"] else "-", _mib(p["rss_bytes"]), p["comm"],
            )
            for p in found
        ],
    )  # fmt: skip


def _ready(process: dict[str, Any]) -> str:
    """A process that never attached has not been asked whether it is ready."""
    if process["ready"]:
        return "yes"
    return "no" if process["attached"] else "-"


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}MiB" if count else "-"


def _lanes(found: list[dict[str, Any]], *, wide: bool) -> None:
    rows = []
    for lane in found:
        notes = " ".join(f"{k}={v}" for k, v in lane["details"].items())
        if lane["wait_on"]:
            notes = f"waits for {lane['wait_on']} {notes}".strip()
        notes += " (torn)" if lane["torn"] else ""
        limit = age(lane["limit_s"]) if lane["limit_s"] else "-"
        rows.append((lane["address"], lane["cls"], lane["phase"], age(lane["age_s"]), limit, notes))
    table(("LANE", "CLASS", "PHASE", "AGE", "LIMIT", "DETAILS"), rows, fit=not wide)
