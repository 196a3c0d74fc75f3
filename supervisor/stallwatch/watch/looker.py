"""One engine's looks: board, members, exits and host put into a Snapshot, memory folded in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from stallwatch import procfs
from stallwatch.board.image import BoardImage
from stallwatch.board.seen import survey
from stallwatch.clock import Clock
from stallwatch.watch.grading import starting
from stallwatch.watch.members import Members, Wants
from stallwatch.watch.memory import Memory, remember
from stallwatch.watch.snapshot import EngineFacts, ProcFacts, Snapshot
from stallwatch.watch.sources import Host, WatchedEngine


class Looker:
    """Looks at one engine. Owned by the judging thread; nothing here is locked.

    `fault` is the text of the last failure to read the board, "" when the last look read it (or
    there is none): the processes are judged all the same.
    """

    def __init__(
        self, engine: WatchedEngine, *, clock: Clock, host: Host, proc: Path = procfs.PROC
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._host = host
        self._proc = proc
        self._members = Members(proc)
        self._memory = Memory()
        self.fault = ""

    def look(
        self,
        now_ns: int,
        suspects: Collection[int] = frozenset(),
        *,
        late_ns: int = 0,
        fresh: bool = False,
    ) -> Snapshot:
        """One look. `suspects` are looked at thread by thread, anew each time if `fresh`."""
        facts = self._engine.facts()
        # Exits before the board: who says goodbye writes that before it ends, so an exit seen here
        # has its farewell in the image read after it.
        exits = self._engine.exits()
        image = self._image(facts)
        # The reader may rest a millisecond between two reads; times are judged as of now.
        now_ns = max(now_ns, self._clock.monotonic_ns())
        threads, lively = _lane_threads(image)
        wants = Wants(
            now_ns=now_ns,
            suspects=suspects,
            fresh=fresh,
            io=starting(facts),
            lanes=threads,
            lively=lively,
        )
        processes = self._members.look(self._engine.members(), wants)
        raw = Snapshot(
            now_ns=now_ns,
            engine=facts,
            image=image,
            processes=self._without_our_tracing(processes),
            exits=exits,
            host=self._host.facts(now_ns, late_ns=late_ns),
        )
        self._memory, seen = remember(self._memory, raw, self._engine.policy())
        return seen

    def close(self) -> None:
        """Give the open files back."""
        self._members.close()

    def _image(self, facts: EngineFacts) -> BoardImage | None:
        reader = self._engine.reader
        self.fault = ""
        if reader is None:
            return None
        try:
            image = reader.look(self._clock)
        except Exception as error:
            # What a worker wrote must never stop the judging of its process.
            self.fault = f"the board cannot be read: {error!r}"
            return None
        if image is None:
            self.fault = "the board is gone or damaged: its lanes are not judged, its processes are"
        elif image.incarnation == facts.incarnation:
            return image
        return None

    def _without_our_tracing(self, processes: dict[int, ProcFacts]) -> Mapping[int, ProcFacts]:
        """Only foreign tracers stay. Our tools are asked after the read, so none is too new."""
        traced = [facts for facts in processes.values() if facts.tracer_pid]
        if not traced:
            return processes
        tools = self._engine.our_tools()
        for facts in traced:
            # TracerPid names the tracing thread; a tool is known by its process.
            group = procfs.status(facts.tracer_pid, self._proc).get("Tgid", "")
            if facts.tracer_pid in tools or (group.isdigit() and int(group) in tools):
                processes[facts.pid] = replace(facts, tracer_pid=0)
        return processes


def _lane_threads(
    image: BoardImage | None,
) -> tuple[Mapping[int, Collection[int]], Collection[int]]:
    """The threads that own lanes, by pid; and the pids of which all of these moved at this look."""
    if image is None:
        return {}, ()
    seen = survey(image)
    threads = seen.lineup.threads
    if not seen.moved:
        return seen.lineup.tids, ()
    quiet = {pid for place, pid, _ in threads if not seen.moved[place]}
    return seen.lineup.tids, seen.lineup.tids.keys() - quiet
