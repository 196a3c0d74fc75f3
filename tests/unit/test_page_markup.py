"""Markup of the operator's pages: nothing an engine writes is ever more than text."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.control import page_graph, page_stacks, page_views, page_words
from stallwatch.control.page_markup import Html, el, table
from stallwatch.control.service import Event, LaneView
from stallwatch.lifecycle.states import State
from stallwatch.testing.service import engine_view, stall_report

pytestmark = pytest.mark.http

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b]0;owned\x07\u202e"
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
JSON = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = tuple(stall_report("st-20261130T031502Z-9f2c41aa"))


class Tags(HTMLParser):
    """Which elements and attributes a document really has."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.words.append(data)


@given(st.text())
def test_text_stays_text(text):
    """Any text, as a child or as an attribute, makes no element and no attribute of its own."""
    found = Tags(el("p", text, title=text))

    assert found.tags == {"p"}
    assert found.attributes == {"title"}


def test_only_markup_is_markup():
    """A string that looks like an element is one only if `el` made it."""
    assert el("p", "<b>") == "<p>&lt;b&gt;</p>"
    assert el("p", el("b", "x")) == "<p><b>x</b></p>"
    assert isinstance(table(("A",), [("<i>",)]), Html)


def hostile_engine():
    lane = LaneView(
        HOSTILE, "work", HOSTILE, 3.0, 4.0, 1, 1, 7, 7,
        wait_on=HOSTILE, text=HOSTILE, details=((HOSTILE, 1),),
    )  # fmt: skip
    return engine_view(lanes=(lane,), reason=HOSTILE, command=(HOSTILE,), top_frame=HOSTILE)


def hostile_report():
    report = stall_report("st-20261130T031502Z-9f2c41aa")
    node = {"frame": HOSTILE, "members": [HOSTILE], "threads": 1, "ends": 1, "children": []}
    report.update(
        summary=HOSTILE,
        engine=HOSTILE,
        culprit=dict.fromkeys(report["culprit"], HOSTILE),
        stack_tree={"frame": "", "children": [node]},
        wait_graph={"edges": [{"waiter": HOSTILE, "target": "x", "why": HOSTILE}], "reasons": []},
        timeline=[{"at_s": 1.0, "text": HOSTILE}],
        logs={"tail": [HOSTILE]},
    )
    return report


@pytest.mark.parametrize("body", ["overview", "engine", "stalls", "stall"])
def test_a_hostile_engine_writes_no_markup_and_no_escapes(body):
    """Lanes, frames, logs and graphs full of script and escapes: no such element, no such byte."""
    view, report = hostile_engine(), hostile_report()
    document = {
        "overview": lambda: page_views.overview([view], [report]),
        "engine": lambda: page_views.engine(view, [Event(1, "", "chat", HOSTILE, HOSTILE)]),
        "stalls": lambda: page_views.stalls([report], 1, None),
        "stall": lambda: page_views.stall(report),
    }[body]()
    found = Tags(document)

    assert not found.tags & {"script", "img"}
    assert not any(name.startswith("on") for name in found.attributes)
    assert not {"\x1b", "\x07", "\u202e"} & set(document)
    assert "alert(1)" in "".join(found.words)


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_report_can_be_shown(report):
    """Whatever stands where a report should, the page is made."""
    assert page_views.stall(report).startswith("<h1>")


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefg"), st.sampled_from("abcdefg"), st.text()), max_size=20
    )
)
def test_every_node_of_a_graph_has_one_place(edges):
    """Cycles, loops and islands: each node stands in exactly one column, each edge is drawn once."""
    columns = page_graph.layers(edges)
    nodes = [node for column in columns for node in column]
    drawn = page_graph.draw(edges)

    assert sorted(nodes) == sorted({n for a, b, _ in edges for n in (a, b)})
    assert (drawn or "").count('class="edge"') == len({(a, b) for a, b, _ in edges})


def test_a_chain_reads_from_left_to_right():
    """A waiter stands left of what it waits for, and the culprit is marked."""
    edges = [("api:0", "core:0", ""), ("core:0", "worker:0/model", "")]

    assert page_graph.layers(edges) == [["api:0"], ["core:0"], ["worker:0/model"]]
    assert page_graph.draw(edges, "worker:0/model").count('class="culprit"') == 1


def test_a_culprit_that_is_a_process_is_all_of_its_lanes():
    """A stopped process has no lane of its own: every lane of it is marked, and no namesake."""
    edges = [("api:0/loop", "worker:1/model", ""), ("worker:1/model", "worker:1/copy", "")]
    edges.append(("worker:1/copy", "worker:10/copy", ""))
    assert page_graph.draw(edges, "worker:1").count('class="culprit"') == 2


def test_a_graph_too_large_for_a_picture_is_none():
    """Beyond 40 nodes the table alone is shown."""
    assert page_graph.draw([(f"a{n}", f"b{n}", "") for n in range(21)]) is None


def test_a_stack_tree_is_bounded():
    """A tree wider than the bound ends with a word about the rest."""
    wide = {"frame": "f", "members": [], "threads": 1, "children": [{"frame": "g"}] * 2500}
    found = page_stacks.tree({"children": [wide] * 3})

    assert "more branches" in found
    assert found.count("<code") == page_stacks.MAX_NODES


@pytest.mark.parametrize(
    ("lane", "share"),
    [
        (LaneView("a:0/x", "work", "p", 30.0, 60.0, 1, 1, 1, 1), 0.5),
        (LaneView("a:0/x", "idle", "p", 30.0, 60.0, 1, 1, 1, 1), 0.0),
        (LaneView("a:0/x", "work", "p", 30.0, float("inf"), 1, 1, 1, 1), 0.0),
    ],
)
def test_only_a_limit_that_applies_is_used_up(lane, share):
    """Idle lanes and lanes without a limit have used nothing."""
    assert page_words.used(lane) == share


def test_the_lanes_shown_first_are_the_ones_in_danger():
    """Of many lanes those nearest to their limits are taken, and shown by address."""
    ages = {"d": 9.0, "a": 1.0, "c": 5.0, "b": 7.0}
    lanes = [LaneView(n, "work", "p", age, 10.0, 1, 1, 1, 1) for n, age in ages.items()]

    assert [lane.address for lane in page_words.nearest(lanes, 3)] == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (9.96, "10.0s"),
        (75, "1m15s"),
        (90061, "1d1h"),
        (float("nan"), "-"),
        (-1, "-"),
    ],
)
def test_ages_in_words(seconds, text):
    """Two units at most; no age is a dash."""
    assert page_words.age(seconds) == text


def test_bad_states_are_called_bad():
    """What /healthz answers 503 for is what the page paints."""
    assert [s for s in State if page_words.level(s) == "bad"] == [
        s for s in State if s in (State.STALLED, State.FAILED, State.EXHAUSTED, State.UNKILLABLE)
    ]
