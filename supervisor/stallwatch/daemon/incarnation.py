"""Everything that lives and dies with one start of an engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stallwatch.board.control import ControlWriter
from stallwatch.board.image import BoardImage
from stallwatch.board.reader import BoardReader
from stallwatch.clock import nanoseconds, seconds
from stallwatch.config.doors import door
from stallwatch.daemon.case import waiting
from stallwatch.daemon.gateway import Foreign
from stallwatch.daemon.premises import Premises
from stallwatch.daemon.readiness import Readiness
from stallwatch.errors import StallwatchError
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.model import ProcessEvidence, Target
from stallwatch.evidence.redact import Redactor
from stallwatch.heartbeat.failure import Failure
from stallwatch.lifecycle.events import Event, EventKind
from stallwatch.process import maps
from stallwatch.process.command import expand
from stallwatch.process.kill import kill
from stallwatch.process.members import Membership
from stallwatch.process.output import OutputPump, Ring
from stallwatch.process.preflight import preflight
from stallwatch.process.spawn import Child, SpawnSpec, spawn
from stallwatch.watch.objects import cache_folders
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import EngineFacts, Exit, Snapshot

if TYPE_CHECKING:
    from stallwatch.daemon.runner import Runner

_NO_LANES = (
    "no process of this engine attached to the heartbeat board: only exits and stopped processes "
    "can be seen. If it is vLLM: its Python may run with -I or -E, or another environment's plugins"
)
_MAX_TARGETS = 64
_NOTE_EVERY_NS = 5_000_000_000  # one process each time
_HALF_LEAST_NS = 4_000_000_000
_HALF_EVERY_NS = 5_000_000_000


class Incarnation:
    """One start: board, run folder, members, output. The judge watches it; cases examine it."""

    def __init__(
        self, name: str, number: int, runner: Runner, *, before: Mapping[int, int] | None = None
    ) -> None:
        self.name = name
        self.number = self.incarnation = number
        self._runner = runner
        self._parts = runner.parts
        self._config = runner.config
        self.reader: BoardReader | None = None
        self._knows(self._config.command, self._config.env)
        self.root_pid = 0
        self.chaos_folder: Path | None = None
        self.caches: Sequence[str] = ()
        self.ring = Ring()
        self.ladder = Ladder(self._parts.clock, self._parts.tools)
        # A ladder of its own for samples at half of a limit: they must never keep a case waiting.
        self._half_ladder = Ladder(self._parts.clock, self._parts.tools)
        self._half_ns = 0
        self.half: tuple[int, Mapping[int, ProcessEvidence]] = (0, {})
        self.membership = Membership(
            reaper=self._parts.reaper,
            owned=Foreign(self._parts.tools, self._parts.desk),
            adopt_orphans=set(self._parts.config.engines) == {name},
            on_change=self._remember,
        )
        self._premises = Premises(name, number, self._parts, self._config)
        self._control: ControlWriter | None = None
        self._pump: OutputPump | None = None
        self._started_ns = 0
        self._ready_ns: int | None = None
        self._before = dict(before or {})
        self._note_ns = 0
        self._stop_ns: int | None = None
        self._grace_ns = 0
        self._over = threading.Event()
        self.readiness = Readiness(
            self,
            self._config,
            self._became_ready,
            self._say_foreign,
        )
        self._members: Mapping[int, int] = {}
        self._exits: tuple[Exit, ...] = ()

    # -- beginning -----------------------------------------------------------------------------

    def start(self) -> None:
        """Pre-flight, board, run folder, spawn. Raises StallwatchError; then close() it."""
        parts, config = self._parts, self._config
        preflight(port=config.port, old_members=self._before)
        board, run = self._premises.make(self._remember)
        self._control = ControlWriter(board.file)
        self.membership.board = maps.identify(str(board.file))
        self.ladder.run_folder = self._half_ladder.run_folder = board.path
        values = {
            "port": config.port,
            "name": self.name,
            "incarnation": self.number,
            "run_dir": run.path,
        }
        command = expand(config.command, values)
        env = self._premises.environment(command)
        self.chaos_folder = self._premises.chaos
        self._knows(command, env)
        self.caches = cache_folders(env)
        cwd = str(config.cwd) if config.cwd else None
        spec = SpawnSpec(command=command, env=env, cwd=cwd)
        self._remember()  # with the board's inode: who maps it is found even if we die at the spawn
        self.reader = BoardReader(board.path)
        child = spawn(spec, hold=parts.reaper.hold())
        self._started_ns = parts.clock.monotonic_ns()
        self.root_pid = child.pid
        self.membership.add_root(child.pid, child.start_ticks, child.pidfd)
        try:
            self._follow(child)
        except BaseException:
            if self._pump is None:
                os.close(child.output)
            if kill(self.membership).gone:  # a tree that nobody follows must not live
                self.bury()
            raise

    def _follow(self, child: Child) -> None:
        parts, config = self._parts, self._config
        self._members = self.membership.members()
        self._pump = OutputPump(
            child.output,
            ring=self.ring,
            file=str(parts.state_dir / "logs" / f"{self.name}.log"),
            passthrough=parts.stderr if config.logs == "passthrough" else None,
        )
        text = f"incarnation {self.number} started, pid {child.pid}"
        parts.events.emit(self.name, "started", text, pid=child.pid, incarnation=self.number)

    def _knows(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.redactor = Redactor.of(command, env)
        self._parts.events.redactors[self.name] = self.redactor
        self.command: Sequence[str] = self.redactor.redact_argv(command)

    def await_ready(self) -> None:
        """A job: post BECAME_READY once it is so. Ends with the incarnation."""
        self.readiness.wait(self._over)

    @property
    def waits_for(self) -> str:
        """What READY still needs, in words; '' once it is."""
        return "" if self._ready_ns is not None else self.readiness.waits_for

    def age_s(self) -> float:
        """Seconds since it was spawned."""
        return seconds(self._parts.clock.monotonic_ns() - self._started_ns)

    def pids(self) -> list[int]:
        """Its living processes."""
        return list(self._members)

    def _say_foreign(self, words: str) -> None:
        self._parts.events.emit(self.name, "foreign", words, port=self._config.port)

    def _became_ready(self) -> None:
        self._ready_ns = self._parts.clock.monotonic_ns()
        text = f"ready after {self.age_s():.1f} s"
        if place := door(self._parts.config, self.name):
            text += f"; clients connect to {place}"
        snapshot = self.latest()
        if snapshot is None or snapshot.image is None or not snapshot.image.processes:
            self._parts.events.emit(self.name, "no-lanes", _NO_LANES)
            text += "; no heartbeats: only exits and stopped processes can be seen"
        self._runner.post(Event(EventKind.BECAME_READY, text=text))

    # -- the runner's tick ---------------------------------------------------------------------

    def tick(self) -> None:
        """Who was born, who ended. Called ten times a second."""
        self._parts.reaper.poll()
        image = snapshot.image if (snapshot := self.latest()) else None
        known = image.processes if image else ()
        ended = self.membership.poll(
            [(p.pid, p.start_ticks) for p in known],
            detached=[(p.pid, p.start_ticks) for p in known if p.detached],
        )
        self._members = self.membership.members()
        self._note_shared()
        if ended:
            self._exits = self.membership.exits()
            self._parts.judge.poke()

    def _note_shared(self) -> None:
        """Remember whose shared memory is whose, in case they all die before a kill can look.

        Reading the maps of a torch process takes milliseconds: rarely, and first when READY.
        """
        now = self._parts.clock.monotonic_ns()
        if self._ready_ns is not None and now - self._note_ns > _NOTE_EVERY_NS:
            self._note_ns = now
            self.membership.shared.note(self._members)

    def served(self) -> bool:
        """A front end has finished at least one request."""
        snapshot = self.latest()
        lanes = snapshot.image.lanes if snapshot and snapshot.image else ()
        return any(lane.work > 0 for lane in lanes if lane.role in ("api", "core", "worker"))

    # -- what the judge asks (values prepared elsewhere) ---------------------------------------

    def facts(self) -> EngineFacts:
        desk = self._parts.desk
        return EngineFacts(
            name=self.name,
            incarnation=self.number,
            state=self._runner.state.state,
            root_pid=self.root_pid,
            started_ns=self._started_ns,
            ready_ns=self._ready_ns,
            stop_asked_ns=self._stop_ns,
            stop_grace_ns=self._grace_ns,
            silence=desk.silence(self.name, self.number, self._image) if desk is not None else None,
        )

    def _image(self) -> BoardImage | None:
        snapshot = self.latest()
        return snapshot.image if snapshot is not None else None

    def members(self) -> Mapping[int, int]:
        return self._members

    def exits(self) -> tuple[Exit, ...]:
        return self._exits

    def policy(self) -> Policy:
        return self._runner.policy

    def our_tools(self) -> frozenset[int]:
        return self._parts.tools.pids()

    # -- what a case asks ----------------------------------------------------------------------

    def latest(self) -> Snapshot | None:
        snapshot = self._parts.judge.latest(self.name)
        if snapshot is None or snapshot.engine.incarnation != self.number:
            return None
        return snapshot

    def look(self, suspects: frozenset[int]) -> Snapshot | None:
        """A thorough look now; None when the judge cannot give one (then nothing is withdrawn)."""
        self.tick()  # an exit that happened meanwhile explains more than what it left behind
        try:
            return self._parts.judge.look_now(self.name, suspects)
        except StallwatchError:
            return None

    def targets(self, snapshot: Snapshot) -> list[Target]:
        """Every living member, attached ones first."""
        attached = {p.pid: p for p in snapshot.image.processes} if snapshot.image else {}
        members = self.membership.members()
        found: list[Target] = []
        for pid in sorted(members, key=lambda p: p not in attached):
            known = attached.get(pid)
            if known is not None and known.start_ticks == members[pid]:
                found.append(
                    Target(
                        pid,
                        members[pid],
                        known.role,
                        known.rank,
                        known.dump_signal,
                        known.dump_path,
                    )
                )
            else:
                found.append(Target(pid, members[pid]))
        return found[:_MAX_TARGETS]

    def may_sample(self, limit_ns: int) -> bool:
        """Whether a warning is worth stacks: not for short limits, and once in five seconds."""
        now = self._parts.clock.monotonic_ns()
        if limit_ns < _HALF_LEAST_NS or now - self._half_ns < _HALF_EVERY_NS:
            return False
        self._half_ns = now
        return True

    def sample(self, snapshot: Snapshot) -> None:
        """Stacks at half of a limit: with those at the limit they tell stuck from slow."""
        found = self._half_ladder.first(self.targets(snapshot), deadline_s=1.0)
        self.half = (self._parts.clock.monotonic_ns(), found)

    def log_tail(self, lines: int) -> Sequence[str]:
        return self.ring.tail(lines)

    def held(self) -> int:
        """Requests that gateways hold for this engine, as they said last."""
        return self._parts.desk.holds(self.name) if self._parts.desk is not None else 0

    def told(self, failure_id: str, since_ns: int) -> int:
        """Clients of gateways that were answered with this FAILURE; 0: not known yet."""
        desk = self._parts.desk
        return desk.told(self.name, failure_id, since_ns) if desk is not None else 0

    # -- what the runner orders ----------------------------------------------------------------

    def declare(self, failure: Failure) -> None:
        """Publish the FAILURE to every process that attached."""
        if self._control is not None:
            self._control.declare(failure)

    def clear(self) -> None:
        if self._control is not None and not self._over.is_set():
            self._control.clear()

    def stop_asked(self) -> None:
        """Tell the processes; exits are expected once SIGTERM is sent."""
        # Whose shared memory is whose, while they can still be asked: tensor-parallel vLLM makes
        # its segments at the first request and leaves them when it ends by itself.
        self.membership.shared.of(self._members)
        self._over.set()
        if self._control is not None:
            self._control.ask_stop()

    def grace_begins(self, grace_s: float) -> None:
        """SIGTERM is about to be sent: SHUTDOWN_HANG is judged from here."""
        self._grace_ns = nanoseconds(grace_s)
        self._stop_ns = self._parts.clock.monotonic_ns()

    def pending(self) -> int | None:
        """Requests that front ends still answer; None when the board cannot say."""
        snapshot = self.latest()
        return waiting(snapshot) if snapshot is not None and snapshot.image is not None else None

    def await_idle(self, limit_s: float) -> bool:
        """Wait until no request is pending; False when the time was over first.

        An engine that does not count its requests is known by the gateway's count alone.
        """
        began = self._parts.clock.monotonic_ns()
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if not self._busy(began) or not self.members():
                return True
            time.sleep(0.05)
        return not self._busy(began)

    def _busy(self, since_ns: int) -> bool:
        desk = self._parts.desk
        return bool(self.pending()) or (desk is not None and desk.owes(self.name, since_ns))

    @property
    def dropped(self) -> int:
        return self._pump.dropped if self._pump else 0

    # -- the end -------------------------------------------------------------------------------

    def bury(self) -> None:
        """The tree is gone: read its last words, remove what it leaves, forget it."""
        self._over.set()
        if self._pump is not None:
            self._pump.finish()
            self._pump = None
        self._members = {}
        self._premises.remove()

    def close(self) -> None:
        """Give every descriptor back. Nothing is ended by this; what never started is removed."""
        self._over.set()
        if self.root_pid == 0:
            self.bury()
        if self._pump is not None:
            self._pump.finish(0.1)
            self._pump = None
        self.membership.close()
        if self.reader is not None:
            self.reader.close()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _remember(self) -> None:
        self._premises.remember(self.membership, self.root_pid)
