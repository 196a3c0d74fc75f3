"""The merged tree names the odd rank."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.evidence import stackview
from stallwatch.evidence.model import Frame, ProcessEvidence, Rung, Target, ThreadStack
from stallwatch.evidence.stacktree import MAX_NODES, build, classes, lines, ranks


def evidence(paths: dict[int, list[str]], role: str = "worker") -> dict[int, ProcessEvidence]:
    """One thread a rank; paths are outermost first."""
    return {
        100 + rank: ProcessEvidence(
            Target(100 + rank, 1, role, rank),
            Rung.PYSPY,
            (ThreadStack(1, "t", tuple(Frame(n, "m.py", 1) for n in reversed(path))),),
        )
        for rank, path in paths.items()
    }


def test_the_odd_rank_is_a_class_of_its_own():
    """Seven ranks in a collective and one elsewhere: two classes, with exact members."""
    stacks = evidence({r: ["run", "step", "all_reduce"] for r in range(7)} | {7: ["run", "load"]})
    tree = build(stacks)
    assert tree["members"] == ["worker:0-7"]
    found = {c.members: c.frames[0] for c in classes(tree)}
    assert found == {("worker:0-6",): "all_reduce (m.py:1)", ("worker:7",): "load (m.py:1)"}
    assert list(lines(tree)) == [
        "run (m.py:1)  [worker:0-7]",
        "  step (m.py:1)  [worker:0-6]",
        "  all_reduce (m.py:1)",
        "  load (m.py:1)  [worker:7]",
    ]


def test_a_thread_that_ends_above_others_is_its_own_class():
    """A rank that stands where others passed is not counted among those that went on."""
    tree = build(evidence({0: ["run", "step"], 1: ["run"]}))
    assert {c.members: len(c.frames) for c in classes(tree)} == {("worker:0",): 2, ("worker:1",): 1}


def test_roles_are_told_apart():
    """Members are listed by role, and a process without a role by its pid."""
    stacks = evidence({0: ["run"]}) | evidence({1: ["run"]}, role="core")
    stacks[5] = ProcessEvidence(Target(5, 1), Rung.PYSPY, stacks[100].threads)
    assert build(stacks)["children"][0]["members"] == ["core:1", "pid:5", "worker:0"]


@settings(deadline=None)  # a loaded machine is no failure
@given(st.sets(st.integers(0, 60)))
def test_ranks_are_written_exactly(found):
    """The ranges name exactly the ranks of the set."""
    back: set[int] = set()
    for part in filter(None, ranks(found).split(",")):
        first, _, last = part.partition("-")
        back |= set(range(int(first), int(last or first) + 1))
    assert back == found


@settings(deadline=None)  # a loaded machine is no failure
@given(st.dictionaries(st.integers(0, 9), st.lists(st.sampled_from("abc"), max_size=6), max_size=8))
def test_every_thread_is_counted_once(paths):
    """The classes hold every thread once, and parents count what their children hold."""
    tree = build(evidence(paths))
    assert sum(c.threads for c in classes(tree)) == len(paths) == tree["threads"]
    todo = [tree]
    while todo:
        node = todo.pop()
        assert node["threads"] == node["ends"] + sum(c["threads"] for c in node["children"])
        todo += node["children"]


def test_the_tree_and_its_text_are_bounded():
    """More different frames than MAX_NODES do not grow the tree, and no thread is lost."""
    stacks = evidence({r: [f"f{r}_{i}" for i in range(60)] for r in range(60)})
    tree = build(stacks)
    nodes, todo = 0, [tree]
    while todo:
        node = todo.pop()
        nodes += 1
        todo += node["children"]
    assert nodes <= MAX_NODES
    assert sum(c.threads for c in classes(tree)) == 60
    assert len(list(lines(tree, limit=50))) == 51


def test_a_foreign_tree_is_no_error():
    """A tree read back damaged gives what can be read."""
    assert list(lines({"children": [7, {"frame": "\x1b[2Jf"}]})) == ["?[2Jf  []"]
    assert list(classes({})) == []


def test_a_loop_is_found_again_on_another_line():
    """The culprit's class leads although the loop stood on another line when its frame was noted."""
    one = evidence({4: ["main", "doze"]})[104]
    other = evidence({4: ["main", "loop"]})[104]
    tree = build({104: replace(one, threads=(*one.threads, *other.threads))})
    culprit = {"role": "worker", "rank": 4, "frame": "loop (m.py:64)"}

    assert list(stackview.lines(tree, culprit))[:2] == ["[worker:4] 1 thread", "    loop (m.py:1)"]
