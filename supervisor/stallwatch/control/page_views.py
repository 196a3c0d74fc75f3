"""The bodies of the operator's pages: engines, one engine, stalls, one stall. Pure: views in, markup out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import urlencode

from stallwatch.control import page_graph, page_stacks
from stallwatch.control import page_words as words
from stallwatch.control.page_markup import Html, el, join, link, table
from stallwatch.control.service import EngineView, Event, LaneView
from stallwatch.evidence import text

LANES_AT_ONCE = 12  # of an engine, where all engines are shown
STALLS_A_PAGE = 50
_RECENT_EVENTS = 20
_WORST = "the lanes that have used most of their limits"


def overview(engines: Sequence[EngineView], stalls: Sequence[Mapping[str, Any]]) -> Html:
    """All engines, of each the lanes nearest to their limits, and the latest stalls."""
    parts = [
        el("h1", "Engines"),
        table(words.ENGINE_HEAD, map(_engine_row, engines), id_="engines", label="Engines"),
    ]
    for view in engines:
        count = len(view.lanes)
        all_ = link(f"/engines/{view.name}", f"all {count} lanes") if count else None
        parts += [
            el("h2", link(f"/engines/{view.name}", view.name), " lanes"),
            lane_table(words.nearest(view.lanes, LANES_AT_ONCE), id_=f"lanes-{view.name}"),
        ]
        if count > LANES_AT_ONCE:
            parts.append(el("p", f"{LANES_AT_ONCE} of {count}, {_WORST}: ", all_, class_="note"))
    parts += [el("h2", "Latest stalls"), stall_table(stalls)]
    if stalls:
        parts.append(el("p", link("/stalls", "all stalls")))
    return join(parts)


def _engine_row(view: EngineView) -> list[object]:
    name, state, *rest = words.engine_cells(view)
    return [link(f"/engines/{view.name}", name), _badge(state, words.level(view.state)), *rest]


def _badge(state: str, level: str) -> Html:
    return el("span", state, class_=f"badge {level}")


def lane_table(lanes: Sequence[LaneView], *, id_: str) -> Html:
    """Lanes with the share of their limits used. Empty: said in words."""
    rows = []
    for lane in lanes:
        cells: list[object] = list(words.lane_cells(lane))
        cells[5] = _meter(str(cells[5]), words.used(lane))
        rows.append(cells)
    found = table(words.LANE_HEAD, rows, id_=id_, label="Lanes")
    none = "No lanes: this engine sends no heartbeats now."
    return join([found, el("p", none, class_="note", hidden=bool(rows), id=f"{id_}-none")])


def _meter(said: str, share: float) -> Html:
    bar = el(
        "meter", said, min=0, max=1, low=0.5, high=0.8, optimum=0, value=f"{min(share, 1):.2f}"
    )
    return el("span", bar, el("span", said), class_="used none" if said == "-" else "used")


def engine(view: EngineView, events: Sequence[Event]) -> Html:
    """One engine: facts, every lane, every process, what happened lately."""
    _, state, ready, lasts, restarts, why = words.engine_cells(view)
    facts = [
        ("State", _badge(state, words.level(view.state))), ("For", lasts), ("Ready", ready),
        ("Why", why), ("Incarnation", f"{view.incarnation}, started {view.started_at or '-'}"),
        ("Restarts", restarts), ("Enforce", view.enforce), ("Port", view.port or "-"),
        ("Command", " ".join(view.command)), ("Last stall", _stall_link(view.last_stall)),
        ("Top frame", view.top_frame or "-"),
    ]  # fmt: skip
    recent = [(words.when(e.at), e.type, e.message) for e in reversed(events[-_RECENT_EVENTS:])]
    return join(
        [
            el("h1", view.name),
            _facts(facts, id_="facts"),
            el("h2", "Lanes"),
            lane_table(view.lanes, id_=f"lanes-{view.name}"),
            el("h2", "Processes"),
            table(words.PROCESS_HEAD, map(words.process_cells, view.processes), id_="processes"),
            el("h2", "Events"),
            table(("When", "Type", "What"), recent, label="Events")
            if recent
            else el("p", "(none)"),
            el("p", link(f"/stalls?{urlencode({'engine': view.name})}", "stalls of this engine")),
        ]
    )


def _facts(pairs: Sequence[tuple[str, object]], *, id_: str | None = None) -> Html:
    rows = (el("div", el("dt", key), el("dd", value)) for key, value in pairs)
    return el("dl", *rows, id=id_)


def _stall_link(stall_id: str) -> object:
    return link(f"/stalls/{stall_id}", stall_id) if stall_id else "-"


def stall_table(stalls: Sequence[Mapping[str, Any]]) -> Html:
    """Stalls, newest first."""
    rows = []
    for stall in stalls:
        ident, *rest = words.stall_cells(stall)
        rows.append([link(f"/stalls/{ident}", ident), *rest])
    found = table(words.STALL_HEAD, rows, id_="stalls", label="Stalls")
    return join([found, el("p", "(none)", class_="note", hidden=bool(rows), id="stalls-none")])


def stalls(found: Sequence[Mapping[str, Any]], page: int, engine_name: str | None) -> Html:
    """One page of stalls. `found` holds one more than fits when there is another page."""
    more = len(found) > STALLS_A_PAGE
    keep = {"engine": engine_name} if engine_name else {}

    def turn(to: int, word: str, rel: str) -> Html:
        return link(f"/stalls?{urlencode({**keep, 'page': to})}", word, rel=rel)

    nav = el(
        "nav",
        turn(page - 1, "newer", "prev") if page > 1 else None,
        el("span", f"page {page}"),
        turn(page + 1, "older", "next") if more else None,
        class_="pages",
        aria_label="Pages",
    )
    title = f"Stalls of {engine_name}" if engine_name else "Stalls"
    return join([el("h1", title), stall_table(found[:STALLS_A_PAGE]), nav])


def stall(report: Mapping[str, Any]) -> Html:
    """One stall, whole: sentence, culprit, graph, stacks, timeline, and all of it as text."""
    culprit = _table_of(report, "culprit")
    ident = str(report.get("id", ""))
    engine_name = str(report.get("engine", ""))
    facts = [
        ("Kind", report.get("kind")), ("Confidence", report.get("confidence")),
        ("Culprit", words.culprit(report) or "-"), ("Phase", culprit.get("phase") or "-"),
        ("Frame", culprit.get("frame") or "-"), ("Pid", culprit.get("pid") or "-"),
        ("Elapsed", _seconds(report.get("elapsed_s"))), ("Limit", _seconds(report.get("limit_s"))),
        ("Action", report.get("action") or "-"), ("Evidence", report.get("rung")),
        ("Engine", link(f"/engines/{engine_name}", engine_name)),
        ("Incarnation", report.get("incarnation")), ("Detected", words.when(report.get("detected_at"))),
    ]  # fmt: skip
    stacks = page_stacks.tree(report.get("stack_tree"), str(culprit.get("frame") or ""))
    lines = "\n".join(text.render(report))
    return join(
        [
            el("h1", str(report.get("kind") or "Stall")),
            el("p", report.get("summary") or "", class_="summary"),
            el(
                "p",
                el("button", "Copy as text", type="button", id="copy", hidden=True),
                link(f"/stalls/{ident}.txt", "as text"),
                " ",
                link(f"/v1/stalls/{ident}", "as JSON"),
                el("span", "", id="copied", role="status"),
                class_="tools",
            ),
            _facts(facts),
            el("h2", "Who waits for whom"),
            _graph(report),
            el("h2", "Stacks of all processes, merged"),
            stacks or el("p", "(no stacks)", class_="note"),
            el("h2", "Timeline"),
            _timeline(report),
            el("details", el("summary", "The report as text"), _pre(lines)),
        ]
    )


def _pre(lines: str) -> Html:
    """Lines that text.render cleaned: `el` would take the line ends for control characters."""
    return Html(f'<pre id="text" tabindex="0">{escape(lines)}</pre>')


def _graph(report: Mapping[str, Any]) -> Html:
    edges = page_graph.edges_of(report)
    if not edges:
        return el("p", "(nobody is known to wait for another)", class_="note")
    drawn = page_graph.draw(edges, words.culprit(report))
    rows = table(("Waiter", "Waits for", "Why"), edges, label="Who waits for whom")
    picture = el("div", drawn, class_="wide", tabindex=0) if drawn else None
    return join([each for each in (picture, rows) if each is not None])


def _timeline(report: Mapping[str, Any]) -> Html:
    found = report.get("timeline")
    rows = [
        el("li", el("span", _signed(e.get("at_s")), class_="at"), str(e.get("text", "")))
        for e in (found if isinstance(found, list) else [])
        if isinstance(e, Mapping)
    ]
    return el("ol", *rows, class_="timeline") if rows else el("p", "(empty)", class_="note")


def _signed(at: object) -> str:
    return f"{at:+.2f} s" if isinstance(at, int | float) else "-"


def _seconds(value: object) -> str:
    return words.age(float(value)) if isinstance(value, int | float) else "-"


def _table_of(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = report.get(key)
    return found if isinstance(found, Mapping) else {}
