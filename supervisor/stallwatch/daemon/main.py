"""One daemon: its parts, its threads, its exit code. The main thread only waits for signals."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from stallwatch import paths, sdnotify
from stallwatch.clock import SystemClock
from stallwatch.config import GATEWAY, Config, EngineConfig, doors, load
from stallwatch.config.base import reloadable
from stallwatch.config.duration import show_duration
from stallwatch.config.remarks import near_misses
from stallwatch.control.auth import Auth, load_token
from stallwatch.control.server import ControlServer
from stallwatch.daemon.counters import Totals
from stallwatch.daemon.events import EventRing
from stallwatch.daemon.files import ensure_files
from stallwatch.daemon.gateway import GatewayDesk, as_engine
from stallwatch.daemon.hooks import Hooks, Owners
from stallwatch.daemon.log import EventLog
from stallwatch.daemon.parts import Parts
from stallwatch.daemon.runner import Runner
from stallwatch.daemon.service import DaemonService
from stallwatch.daemon.signals import Signals
from stallwatch.errors import ConfigError, StallwatchError, StateDirError
from stallwatch.evidence.ledger import Ledger
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.lifecycle.events import Event, EventKind
from stallwatch.lifecycle.states import State
from stallwatch.process.reaper import Reaper, become_subreaper
from stallwatch.process.spawn import end_unborn
from stallwatch.process.spool import Passthrough
from stallwatch.process.statefile import StateLock, end_leftovers
from stallwatch.watch.judge import Judge
from stallwatch.watch.notice import Notice

EXIT_ASKED, EXIT_BUDGET, EXIT_NEVER_READY, EXIT_INTERNAL, EXIT_DEVICE = 0, 1, 3, 70, 93
_STEP_S = 0.5  # signals and changes of state wake it at once
# STOPPED is not among them: an operator drained it and may start it again.
_DOWN = frozenset({State.FAILED, State.EXHAUSTED, State.UNKILLABLE})
_STATUS_S = 1.0
_UNBORN_S = 5.0  # a spawn that takes longer at the end of the daemon is given up


def run(config: Config) -> int:
    """Supervise until asked to stop or until every engine is given up. Returns the exit code.

    Raises ConfigError or StateDirError (exit 78) before anything is started.
    """
    ensure_files()
    where = Path(config.supervisor.state_dir or paths.state_dir()).absolute()
    lock = StateLock(str(where))
    try:
        daemon = Daemon(config, where)
        try:
            return daemon.run()
        finally:
            daemon.close()
    finally:
        lock.release()


class Daemon:
    """Builds every part; `run` lives until the end; `close` leaves nothing behind."""

    def __init__(self, config: Config, state_dir: Path) -> None:
        _make_folders(state_dir)
        self.config = config
        clock = SystemClock()
        sup = config.supervisor
        self._notify = sdnotify.Notifier()
        token = load_token(str(sup.token_file) if sup.token_file else None)
        self._auth = Auth.for_address(sup.control, token=token)
        self._hooks = Hooks(config.hooks)
        tools = ToolRegistry()
        self._judge = Judge(clock, self._heard, period_s=sup.period)
        desk = GatewayDesk(clock)
        self.parts = Parts(
            config=config,
            clock=clock,
            state_dir=state_dir,
            ledger=Ledger(
                state_dir, max_items=sup.max_stalls, max_bytes=sup.max_evidence_mib << 20
            ),
            events=EventRing(clock, sinks=(self._hooks.sink,)),
            totals=Totals(),
            tools=tools,
            reaper=Reaper(Owners(tools, self._hooks.tools)),
            judge=self._judge,
            stderr=Passthrough(),
            seed=secrets.randbits(32),
            on_state=self._state_changed,
            # a gateway may also be a unit of its own: its reports are heard in any case
            desk=desk,
        )
        self._hooks.emit = self.parts.events.emit
        desk.lost = self._requests_lost
        self._runners = {
            name: Runner(name, engine, self.parts) for name, engine in config.engines.items()
        }
        if config.gateway is not None:
            path = os.path.abspath(self._socket(state_dir))
            front = as_engine(config.gateway, path)
            self._runners[GATEWAY] = runner = Runner(GATEWAY, front, self.parts)
            desk.processes = lambda: runner.incarnation.pids() if runner.incarnation else ()
        self._log = EventLog(self.parts.events)
        service = DaemonService(self.parts, self._runners)
        self._server = ControlServer(
            service,
            control=sup.control,
            socket_path=self._socket(state_dir),
            health_listen=sup.health_listen or None,
            auth=self._auth,
            desk=self.parts.desk,
        )
        self._signals = Signals()
        self._ever_ready: set[str] = set()
        self._next_status = 0.0
        self._next_watchdog = 0.0
        self._said_ready = False

    def _socket(self, state_dir: Path) -> str:
        given = self.config.supervisor.socket
        return str(given) if given else paths.listen_socket(str(state_dir))

    # -- life ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Until a signal or the end of all engines."""
        become_subreaper()
        self._log.start()
        self._hooks.start()
        for left in end_leftovers(
            str(self.parts.state_dir), reaper=self.parts.reaper, owned=self.parts.tools
        ):
            self.parts.events.emit(left.engine, "leftover", left.words())
            if left.engine in self._runners:  # what survives SIGKILL is no company for a new tree
                self._runners[left.engine].survivors = left.survivors()
        for problem in self.parts.ledger.problems:
            self.parts.events.emit("", "fault", problem)
        self._judge.on_tick.append(self._feed_watchdog)
        self._judge.start()
        self._server.start()
        address = self._server.control_address
        socket_path = os.path.abspath(self._socket(self.parts.state_dir))
        self.parts.events.emit("", "serving", serving(self.config, address, socket_path))
        self._remark(self.config)
        for runner in self._runners.values():
            runner.start()
        try:
            return self._live()
        finally:
            self._stop_all()

    def _live(self) -> int:
        while True:
            for number in self._signals.wait(_STEP_S):
                if number in (signal.SIGTERM, signal.SIGINT):
                    name = signal.Signals(number).name
                    self.parts.events.emit("", "asked", stopping(name, self._running()))
                    return EXIT_ASKED
                if number == signal.SIGHUP:
                    self._reload()
            self._tell_systemd()
            code = self._given_up()
            if code is not None:
                return code

    def _running(self) -> dict[str, EngineConfig]:
        """What has a process, or will have one in a moment."""
        alive = (r for r in self._runners.values() if r.state.up or r.state.spawning)
        return {runner.name: runner.config for runner in alive}

    def _given_up(self) -> int | None:
        """The exit code when `exit_when` says that this daemon has nothing left to do."""
        when = self.config.supervisor.exit_when or "never"
        engines = [r for r in self._runners.values() if r.name in self.config.engines]
        down = [r for r in engines if _is_down(r)]
        if when == "never" or not down or (when == "all" and len(down) < len(engines)):
            return None
        if any(r.state.state is State.UNKILLABLE for r in down):
            return EXIT_DEVICE
        ready = [r for r in down if r.name in self._ever_ready]
        return EXIT_BUDGET if ready else EXIT_NEVER_READY

    def _stop_all(self) -> None:
        """Every engine is stopped within its grace, whatever state it is in."""
        self._notify.stopping("stopping every engine")
        for runner in self._runners.values():
            runner.post(Event(EventKind.STOP_ASKED, text="the daemon stops"))
            runner.end()
        configs = (r.config for r in self._runners.values())
        grace = max((e.drain + e.stop_grace for e in configs), default=0)
        unborn_at = time.monotonic() + _UNBORN_S
        until = time.monotonic() + grace + 35.0  # the kill's own deadlines
        hurried = False
        while any(not r.ended.is_set() for r in self._runners.values()):
            if time.monotonic() > until:
                break
            if time.monotonic() > unborn_at and self._spawns():
                unborn_at += _UNBORN_S
                end_unborn()
            for number in self._signals.wait(0.05):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._hurry(signal.Signals(number).name, again=hurried)
                    hurried = True

    def _spawns(self) -> bool:
        """Some engine's program has not begun yet."""
        return any(runner.state.spawning for runner in self._runners.values())

    def _hurry(self, name: str, *, again: bool) -> None:
        if not again:
            self.parts.events.emit(
                "", "asked", f"{name} while stopping: killing what has not ended"
            )
        for runner in self._runners.values():
            runner.hurry()

    def close(self) -> None:
        """Threads, sockets, files: all given back, each within a deadline."""
        self._server.stop()
        self._judge.stop()
        for runner in self._runners.values():
            runner.join(1.0)
        self._hooks.stop()
        for lost in self.parts.ledger.close():
            text = f"report {lost} could not be written whole: it ends with this daemon"
            self.parts.events.emit("", "fault", text)
        self._log.stop()
        self.parts.stderr.close()
        self._signals.close()
        self._notify.close()

    # -- what others say -----------------------------------------------------------------------

    def _heard(self, name: str, notice: Notice) -> None:
        """The judge's sink: into the runner's queue, at once."""
        runner = self._runners.get(name)
        if runner is not None:
            runner.post(notice)

    def _state_changed(self, name: str, state: State) -> None:
        if state is State.READY and name in self.config.engines:
            self._ever_ready.add(name)
        self._signals.wake()

    def _requests_lost(self, engine: str, count: int) -> None:
        """The gateway has ended them; the engine serves others, so nothing else is done."""
        text = f"{count} request{'s' if count > 1 else ''} got no byte within the gateway's limit while "
        self.parts.events.emit(engine, "request-lost", f"{text}others were served", count=count)

    def _feed_watchdog(self) -> None:
        """From the judging loop only: when it stops, systemd notices."""
        every = self._notify.watchdog_s
        now = time.monotonic()
        if every and now >= self._next_watchdog:
            self._next_watchdog = now + every
            self._notify.watchdog()

    def _tell_systemd(self) -> None:
        if not self._notify.active or time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + _STATUS_S
        states = {r.name: str(r.state.state) for r in self._runners.values()}
        words = ", ".join(f"{name} {state}" for name, state in states.items())
        if not self._said_ready and self._ever_ready:
            self._said_ready = self._notify.ready(words)
            return
        if not self._said_ready:
            self._notify.extend(60.0)
        self._notify.status(words)

    def _remark(self, config: Config) -> None:
        """What it says and probably does not mean."""
        for remark in near_misses(config):
            self.parts.events.emit("", "config", remark)

    def _reload(self) -> None:
        """SIGHUP: limits and policies only; any other difference is refused by name."""
        emit = self.parts.events.emit
        self._notify.reloading()
        try:
            if not self.config.source:
                raise ConfigError(
                    "SIGHUP re-reads a file, and this daemon was started with flags",
                    hint="use `stallwatch serve -c FILE`",
                )
            fresh = load(Path(self.config.source))
            refuse_other_changes(self.config, fresh)
            for name, engine in fresh.engines.items():
                self._runners[name].reload(engine)
            self.config = fresh
            emit("", "reloaded", f"limits and policies re-read from {fresh.source}")
            self._remark(fresh)
        except StallwatchError as error:
            emit("", "fault", f"nothing was changed: {error}")
        finally:
            if self._said_ready:
                self._notify.ready()


def serving(config: Config, address: str, socket_path: str) -> str:
    """Who listens where, and how other commands get there, for the first line of the log."""
    control = f"control on http://{address}" if address else "control on the unix socket only"
    # An operator's shell has neither of these: a unit sets them for the daemon alone.
    shell = {**os.environ, "STALLWATCH_SOCKET": "", "STATE_DIRECTORY": ""}
    found = socket_path in paths.client_sockets(shell)
    flag = "" if found else f"other commands need --socket {shlex.quote(socket_path)}"
    parts = (control, f"pid {os.getpid()}", doors.words(config), flag)
    return ", ".join(part for part in parts if part)


def stopping(signal_name: str, running: Mapping[str, EngineConfig]) -> str:
    """What the first signal makes a person wait for, how long at most, and how not to wait."""
    head = f"{signal_name}: stopping every engine"
    if not running:
        return f"{head}: none has a process"
    longest = show_duration(max(e.drain + e.stop_grace for e in running.values()))
    who, they = ", ".join(running), "they are" if len(running) > 1 else "it is"
    return (
        f"{head}: {who} may finish requests and end within {longest} (drain, then stop_grace), "
        f"then {they} killed; a second Ctrl-C or SIGTERM kills at once"
    )


def _make_folders(state_dir: Path) -> None:
    """Private folders in state_dir. Its own rights stay as they are: it may be /tmp, or shared."""
    for name in ("logs", "engines"):
        try:
            (state_dir / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StateDirError(
                f"cannot use {state_dir / name}: {error.strerror}",
                hint="Move what is in its place out of the way, or set another state_dir.",
            ) from error


def _is_down(runner: Runner) -> bool:
    """Down for good, until an operator asks. FAILED with a tree is only on its way."""
    state = runner.state
    return state.state in _DOWN and not (state.state is State.FAILED and state.up)


def refuse_other_changes(old: Config, new: Config) -> None:
    """Raise ConfigError naming the first key that a reload cannot change."""
    if old.supervisor != new.supervisor:
        raise ConfigError(
            "[supervisor] changed", where=new.source, hint="restart the daemon for that"
        )
    if old.gateway != new.gateway:
        raise ConfigError("[gateway] changed", where=new.source, hint="restart the daemon for that")
    if old.hooks != new.hooks:
        raise ConfigError("[hooks] changed", where=new.source, hint="restart the daemon for that")
    if set(old.engines) != set(new.engines):
        names = ", ".join(sorted(set(old.engines) ^ set(new.engines)))
        raise ConfigError(
            f"engines came or went: {names}", where=new.source, hint="restart the daemon for that"
        )
    may_change = reloadable(EngineConfig)
    for name, engine in old.engines.items():
        for key in type(engine).model_fields:
            if key not in may_change and getattr(engine, key) != getattr(new.engines[name], key):
                raise ConfigError(
                    f"[engines.{name}] {key} changed",
                    where=new.source,
                    hint="restart the daemon for that; a reload takes limits, restart and enforce",
                )
