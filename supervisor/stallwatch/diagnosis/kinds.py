"""The kinds of stall, as data: what each means, whom to accuse, and what a restart does for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Names are a public contract: in reports, metrics, FAILURE records and client errors."""

    DEVICE_WAIT = "DEVICE_WAIT"
    COLLECTIVE_DIVERGENCE = "COLLECTIVE_DIVERGENCE"
    ORDER_CYCLE = "ORDER_CYCLE"
    LOST_WAKEUP = "LOST_WAKEUP"
    NO_FORWARD_PROGRESS = "NO_FORWARD_PROGRESS"
    REMOTE_PEER_WAIT = "REMOTE_PEER_WAIT"
    CPU_RUNAWAY = "CPU_RUNAWAY"
    GIL_HELD = "GIL_HELD"
    THREAD_DIED = "THREAD_DIED"
    CHILD_DIED = "CHILD_DIED"
    ERROR_SWALLOWED = "ERROR_SWALLOWED"
    FORK_OR_FD_INHERITANCE = "FORK_OR_FD_INHERITANCE"
    STALE_LOCK_FILE = "STALE_LOCK_FILE"
    LAZY_LOAD_LOCK = "LAZY_LOAD_LOCK"
    NEVER_READY = "NEVER_READY"
    FRONTEND_BLOCKED = "FRONTEND_BLOCKED"
    PAUSED_TOO_LONG = "PAUSED_TOO_LONG"
    SHUTDOWN_HANG = "SHUTDOWN_HANG"
    UNKILLABLE = "UNKILLABLE"
    LEFTOVER_RESOURCE = "LEFTOVER_RESOURCE"
    OUTPUT_BLOCKED = "OUTPUT_BLOCKED"
    DEGRADED = "DEGRADED"
    PROCESS_STOPPED = "PROCESS_STOPPED"
    UNKNOWN_STALL = "UNKNOWN_STALL"


class Action(StrEnum):
    """What is done about a verdict."""

    OBSERVE = "observe"  # enforce = "observe": report only
    ALERT = "alert"  # this kind is reported, clients are not failed and nothing is killed
    FAIL = "fail"  # fail the clients, kill the tree, do not restart
    RESTART = "restart"  # fail the clients, kill the tree, restart within the budget


class Remedy(StrEnum):
    """What would cure a kind. The machine has one way to end an engine, SIGKILL to its whole tree,
    and one to begin it again; what it cannot express is advice to the operator.
    """

    RESTART = "restart"  # at once, within the budget
    GROUP = "restart-group"  # every rank; one alone would leave its peers in the collective
    KILL = "kill"  # SIGKILL only: no signal handler of it can run, and no stop helps
    FINISH = "finish-stop"  # SIGKILL ends the stop that was asked for; it begins nothing
    DRAIN = "drain"  # empty the pipe or mend its reader; a restart buys time
    FRONT_END = "restart-front-end"  # the engine behind it is well; here they end together
    RESUME = "resume"  # the owner of a lease is to end it
    REPORT = "report"  # nothing is to be done to the engine
    MEND_FIRST = "mend-first"  # a restart does not help, or makes it worse


_ACTIONS: Mapping[Remedy, Action] = {
    Remedy.RESTART: Action.RESTART,
    Remedy.GROUP: Action.RESTART,
    Remedy.KILL: Action.RESTART,
    Remedy.FINISH: Action.FAIL,
    Remedy.DRAIN: Action.RESTART,
    Remedy.FRONT_END: Action.RESTART,
    Remedy.RESUME: Action.ALERT,
    Remedy.REPORT: Action.ALERT,
    Remedy.MEND_FIRST: Action.FAIL,
}


@dataclass(frozen=True, slots=True)
class KindInfo:
    """One kind's page: a class for tables, one line of meaning, whom it accuses, cure and advice."""

    code: str  # "K01"; "" for UNKNOWN_STALL
    meaning: str
    culprit: str
    remedy: Remedy
    advice: str

    @property
    def by_kind(self) -> Action:
        """The action under policy = "by-kind"."""
        return _ACTIONS[self.remedy]


_R = Remedy

KINDS: Mapping[Kind, KindInfo] = {
    Kind.DEVICE_WAIT: KindInfo(
        "K01",
        "a host thread waits for the accelerator, and the work never ends",
        "the rank whose device phase is oldest, its thread and frame",
        _R.RESTART,
        "Twice on one device within a day: suspect the device, not the engine.",
    ),
    Kind.COLLECTIVE_DIVERGENCE: KindInfo(
        "K02",
        "ranks issued different collectives, or one never arrived",
        "the one rank that left the step or is in another one",
        _R.GROUP,
        "Look at the odd rank; the ranks that wait are victims.",
    ),
    Kind.ORDER_CYCLE: KindInfo(
        "K03",
        "processes or locks wait for each other in a circle",
        "the circle: its edges, each with its phase",
        _R.GROUP,
        "It will recur when the same order recurs; the report lists the edges.",
    ),
    Kind.LOST_WAKEUP: KindInfo(
        "K04",
        "a message or completion vanished; all wait in their normal idle place",
        "the channel: its writer and its reader",
        _R.RESTART,
        "Compare what the writer sent with what the reader saw.",
    ),
    Kind.NO_FORWARD_PROGRESS: KindInfo(
        "K05",
        "the scheduler turns but schedules nothing",
        "the lane that turns",
        _R.RESTART,
        "Look at the queue counts, deferred and skipped queues included.",
    ),
    Kind.REMOTE_PEER_WAIT: KindInfo(
        "K06",
        "a request waits for another machine that died, restarted or forgot",
        "the peer, as the waiting lane named it",
        _R.MEND_FIRST,
        "Mend or drop the peer first; a local restart does not help.",
    ),
    Kind.CPU_RUNAWAY: KindInfo(
        "K07",
        "a thread computes without end",
        "the thread and its function",
        _R.RESTART,
        "If the same input triggers it again, reject that input.",
    ),
    Kind.GIL_HELD: KindInfo(
        "K08",
        "a thread sits in C code holding the GIL; no Python runs in that process",
        "the thread that owns the GIL",
        _R.KILL,
        "Report the C call to its library: it should release the GIL.",
    ),
    Kind.THREAD_DIED: KindInfo(
        "K09",
        "a needed thread ended while its process lives on",
        "the lane whose thread is gone",
        _R.RESTART,
        "The last traceback in the log tail usually says why.",
    ),
    Kind.CHILD_DIED: KindInfo(
        "K10",
        "a process of the engine ended, and nobody asked it to",
        "the first process that ended",
        _R.GROUP,
        "The log tail says why.",
    ),
    Kind.ERROR_SWALLOWED: KindInfo(
        "K11",
        "a fatal error was logged and the process carried on useless",
        "the process that wrote the error",
        _R.RESTART,
        "The log tail holds the error.",
    ),
    Kind.FORK_OR_FD_INHERITANCE: KindInfo(
        "K12",
        "a forked child inherited a held lock or an open pipe",
        "the child that was forked",
        _R.RESTART,
        "Use spawn instead of fork.",
    ),
    Kind.STALE_LOCK_FILE: KindInfo(
        "K13",
        "waiting for a lock file whose owner is dead",
        "the thread that polls; the path is in the summary",
        _R.MEND_FIRST,
        "Delete the lock file that the report names, then restart.",
    ),
    Kind.LAZY_LOAD_LOCK: KindInfo(
        "K14",
        "the first use of a kernel took a driver-wide lock during a collective",
        "the rank that loads",
        _R.GROUP,
        "Load kernels eagerly and warm the shape up.",
    ),
    Kind.NEVER_READY: KindInfo(
        "K15",
        "start-up does not finish",
        "the process and phase that everybody waits for",
        _R.RESTART,
        "See which process has not called ready(), and its phase; raise [limits] start if it was slow.",
    ),
    Kind.FRONTEND_BLOCKED: KindInfo(
        "K16",
        "the HTTP event loop is blocked while the engine is fine",
        "the front end and the function on its loop",
        _R.FRONT_END,
        "The stack names the handler that blocks the loop.",
    ),
    Kind.PAUSED_TOO_LONG: KindInfo(
        "K17",
        "a declared pause outlived its lease",
        "the owner of the lease",
        _R.RESUME,
        "Ask the lease's owner to resume, or restart the engine yourself.",
    ),
    Kind.SHUTDOWN_HANG: KindInfo(
        "K18",
        "asked to stop, it did not",
        "the process that did not end",
        _R.FINISH,
        "The stack says what held it; what follows is what was asked for, a stop or a restart.",
    ),
    Kind.UNKILLABLE: KindInfo(
        "K19",
        "a process survives SIGKILL",
        "the process that survived, its state and wait channel",
        _R.MEND_FIRST,
        "The device or driver is lost: drain this host and reboot it.",
    ),
    Kind.LEFTOVER_RESOURCE: KindInfo(
        "K20",
        "something from an earlier run still holds a port, GPU memory or shared memory",
        "whoever holds the port, memory or file",
        _R.MEND_FIRST,
        "End the holder that the report names, then restart.",
    ),
    Kind.OUTPUT_BLOCKED: KindInfo(
        "K21",
        "results or output are not taken: a process blocks in handing them over",
        "the lane that writes; its reader is in the summary when known",
        _R.DRAIN,
        "Drain the reader; a restart only hides it.",
    ),
    Kind.DEGRADED: KindInfo(
        "K22",
        "slow, but moving",
        "the lane that slowed down most",
        _R.REPORT,
        "Look at the phase with the largest share.",
    ),
    Kind.PROCESS_STOPPED: KindInfo(
        "K23",
        "a process was stopped by a signal (state T) and nobody traces it",
        "the stopped process",
        _R.RESTART,
        "Find who sent SIGSTOP: a debugger, a job-control terminal, an operator; a restart cures it.",
    ),
    Kind.UNKNOWN_STALL: KindInfo(
        "",
        "it does not move, and the evidence fits no kind well enough to name one",
        "the end of the chain of waits, as far as it goes",
        _R.RESTART,
        "Read the culprit's stack first; `stallwatch dump ID` bundles it.",
    ),
}

# What usually sends a signal that ended a process: only for an exit by that signal.
SIGNALS: Mapping[int, str] = {
    4: "an instruction this CPU lacks",
    6: "a native watchdog, or an assertion in C",
    7: "shared memory: /dev/shm full, or a file that was cut",
    9: "out of memory, or an operator",
    11: "a crash in C code; the log tail may hold its trace",
    15: "somebody asked it to end: an operator, a unit, another process",
}
