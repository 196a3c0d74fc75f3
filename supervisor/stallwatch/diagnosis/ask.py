"""What else should be looked at before a verdict: the pipes and lock files that threads sleep on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stallwatch.diagnosis import frames as fr
from stallwatch.diagnosis.verdict import Case
from stallwatch.diagnosis.vocabulary import DEFAULT, Vocabulary
from stallwatch.evidence.model import ProcessEvidence, ThreadStack
from stallwatch.watch.objects import Question, Thread

MAX_THREADS = 64
LOG_LINES = 40


def question(case: Case, caches: Sequence[str] = (), words: Vocabulary = DEFAULT) -> Question:
    """The question that the first stacks raise; an empty one when nobody sleeps on a pipe or lock."""
    image = case.snapshot.image
    texts = [lane.text for lane in (image.lanes if image else ()) if lane.text]
    return Question(
        writing=tuple(_asleep_in(case, words.full_pipe_wchans))[:MAX_THREADS],
        reading=tuple(_asleep_in(case, words.empty_pipe_wchans))[:MAX_THREADS],
        members=tuple(case.snapshot.processes),
        children=tuple(_strangers(case)),
        texts=(*texts, *case.log_tail[-LOG_LINES:]),
        caches=tuple(caches),
        polling=any(_says_lock(t, words) for e in case.stacks.values() for t in e.threads),
    )


def _strangers(case: Case) -> Iterator[tuple[int, int]]:
    """Members with one thread that never attached, each with its parent."""
    image = case.snapshot.image
    attached = {p.pid for p in image.processes} if image else set()
    attached |= set(case.snapshot.recall.attached)
    members = case.snapshot.processes
    for pid, facts in members.items():
        if pid not in attached and facts.ppid in members and facts.threads == 1:
            yield (pid, facts.ppid)


def _asleep_in(case: Case, wchans: tuple[str, ...]) -> Iterator[Thread]:
    for pid, evidence in case.stacks.items():
        for tid in _tids(evidence):
            facts = evidence.thread_facts.get(tid, {})
            if facts.get("wchan", "").startswith(wchans):
                yield (pid, tid)


def _tids(evidence: ProcessEvidence) -> list[int]:
    return list(evidence.thread_facts)[:MAX_THREADS]


def _says_lock(thread: ThreadStack, words: Vocabulary) -> bool:
    return any(fr.says_lock(frame, words) for frame in fr.python_frames(thread.frames)[:4])
