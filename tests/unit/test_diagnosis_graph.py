"""The wait-for graph: edges, roots, circles."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis import graph
from stallwatch.diagnosis.verdict import Edge
from stallwatch.testing.cases import Build, finding
from stallwatch.watch.finding import Rule
from stallwatch.watch.snapshot import Snapshot

WAIT = LaneClass.WAIT


def look(build: Build) -> Snapshot:
    return build.case(finding(Rule.NO_PROGRESS)).snapshot


def pairs(found: tuple[Edge, ...]) -> set[tuple[str, str]]:
    return {(e.waiter, e.target) for e in found}


def test_a_wait_names_one_several_or_all_ranks() -> None:
    """One address, a comma list and `worker:*/main` become one edge per lane meant."""
    build = Build()
    core = build.member(1, "core")
    for rank in range(3):
        build.lane(build.member(10 + rank, "worker", rank), "main", "execute_model")
    build.lane(core, "a", "w", cls=WAIT, on="worker:1/main")
    build.lane(core, "b", "w", cls=WAIT, on="worker:0/main, worker:2/main")
    build.lane(core, "c", "w", cls=WAIT, on="worker:*/main")
    found = pairs(graph.edges(look(build)))
    assert {t for w, t in found if w == "core:0/a"} == {"worker:1/main"}
    assert {t for w, t in found if w == "core:0/b"} == {"worker:0/main", "worker:2/main"}
    assert {t for w, t in found if w == "core:0/c"} == {f"worker:{n}/main" for n in range(3)}


def test_a_work_lane_has_no_edge_and_an_idle_one_only_to_a_stuck_supplier() -> None:
    """`idle(on=...)` counts when the supplier is known not to move, is stopped, or is not there."""
    build = Build()
    a, b = build.member(1, "worker"), build.member(2, "offload")
    build.lane(a, "main", cls=LaneClass.IDLE, on="offload:0/ple")
    build.lane(b, "ple", "gather", on="worker:0/main")
    assert pairs(graph.edges(look(build))) == set()
    assert pairs(graph.edges(look(build), {"offload:0/ple"})) == {
        ("worker:0/main", "offload:0/ple")
    }
    b.state = "T"
    assert pairs(graph.edges(look(build))) == {("worker:0/main", "offload:0/ple")}
    b.state = "S"
    build.lanes.pop()
    assert pairs(graph.edges(look(build))) == {("worker:0/main", "offload:0/ple")}


def test_a_wait_for_a_process_goes_on_to_its_busiest_lane() -> None:
    """`worker:0` is followed into the lane of it that has been out of idle longest."""
    build = Build()
    core, worker = build.member(1, "core"), build.member(2, "worker")
    build.lane(core, "main", "w", cls=WAIT, on="worker:0")
    build.lane(worker, "main", "execute_model", age=5)
    build.lane(worker, "output", "out_copy", age=50)
    build.lane(worker, "spare", age=500)
    chain = graph.root("core:0/main", graph.edges(look(build)))
    assert chain.path == ("core:0/main", "worker:0", "worker:0/output")


def test_a_missing_target_is_the_root() -> None:
    """A closed lane and a rank that never was end the chain."""
    build = Build()
    core = build.member(1, "core")
    build.lane(core, "main", "w", cls=WAIT, on="worker:7/main")
    assert graph.root("core:0/main", graph.edges(look(build))).root == "worker:7/main"


def test_circles_are_found_once_each() -> None:
    """Two circles through one node: both, each from its smallest member; a chain is none."""
    edges = [Edge(*e) for e in ("ab", "bc", "ca", "bd", "db", "xa")]
    assert set(graph.cycles(edges)) == {("a", "b", "c"), ("b", "d")}
    assert graph.cycles([Edge("a", "b"), Edge("b", "c")]) == ()
    chain = graph.root("x", edges, lambda options: options[0])
    assert chain.cycle == ("a", "b", "c")


def test_a_hostile_target_is_a_name_and_no_pattern() -> None:
    """Brackets and question marks mean themselves; a thousand commas cost sixty-four targets."""
    build = Build()
    core = build.member(1, "core")
    build.lane(
        core, "main", "w", cls=WAIT, on="core:[0-9]/m*n,core:?/main," + ",".join("abc") * 500
    )
    found = graph.edges(look(build))
    assert ("core:0/main", "core:[0-9]/m*n") in pairs(found)
    assert ("core:0/main", "core:?/main") in pairs(found)
    assert len(found) <= graph.MAX_TARGETS


names = st.sampled_from("abcdef")


@given(st.lists(st.tuples(names, names)))
def test_every_walk_ends(raw: list[tuple[str, str]]) -> None:
    """Whatever the edges, root() ends, visits nobody twice, and a cycle is a real one."""
    edges = [Edge(a, b) for a, b in raw]
    known = set(raw)
    chain = graph.root("a", edges)
    assert len(set(chain.path)) == len(chain.path)
    for circle in [*graph.cycles(edges), *([chain.cycle] if chain.cycle else [])]:
        assert all(pair in known for pair in zip(circle, (*circle[1:], circle[0]), strict=True))
