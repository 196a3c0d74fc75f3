"""The life of one engine: a total table over State x EventKind of small pure functions.

There is no impossible pair: whatever a runner reports late, twice or out of order has a cell that
never loses a tree and never makes a second one. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from stallwatch.lifecycle import cells as c
from stallwatch.lifecycle.cells import Result, effective, keep
from stallwatch.lifecycle.engine import EngineState
from stallwatch.lifecycle.events import Action, Do, Event, EventKind
from stallwatch.lifecycle.states import State

__all__ = ["TABLE", "effective", "step"]

Cell = Callable[[EngineState, Event, int], Result]


def step(state: EngineState, event: Event, now_ns: int) -> Result:
    """The next state and the orders that lead there. Total: every pair has an answer."""
    after, actions = TABLE[event.kind][state.state](state, event, now_ns)
    if after.state is not state.state:
        after = replace(after, since_ns=now_ns)
        words = f"{state.state} -> {after.state}"
        text = f"{words}: {after.reason}" if after.reason else words
        actions = (*actions, Action(Do.SAVE_STATE), Action(Do.ANNOUNCE, text=text))
    elif after.budget != state.budget or after.wanted != state.wanted:
        actions = (*actions, Action(Do.SAVE_STATE))
    return after, actions


# -- the table ---------------------------------------------------------------------------------

_ = keep
# fmt: off
_ROWS: Mapping[EventKind, tuple[Cell, ...]] = {
    # columns: STOPPED, STARTING, READY, SUSPECT, STALLED, FAILED,
    #          DRAINING, STOPPING, BACKOFF, EXHAUSTED, UNKILLABLE
    EventKind.START_ASKED:      (c.start, _, _, _, _, _,
                                 c.start_after_stop, c.start_after_stop, _, _, _),
    EventKind.SPAWNED:          (c.spawned_while_stopped, c.spawned, _, _, _, c.spawned_too_late,
                                 _, c.spawned_too_late, c.spawned_in_backoff, c.spawned_too_late, c.spawned_too_late),
    EventKind.SPAWN_FAILED:     (_, c.spawn_failed, _, _, _, _,
                                 _, c.no_spawn, _, _, _),
    EventKind.PREFLIGHT_FAILED: (_, c.preflight_failed, _, _, _, _,
                                 _, c.no_spawn, _, _, _),
    EventKind.BECAME_READY:     (_, c.became_ready, _, c.note_ready, c.note_ready_if_observing, _,
                                 _, _, _, _, _),
    EventKind.SERVED:           (_, c.served, c.served, c.served, c.served, _,
                                 c.served, c.served, _, _, _),
    EventKind.HEALTHY:          (_, _, c.healthy, _, _, _,
                                 _, _, _, _, _),
    EventKind.SUSPECTED:        (_, c.suspect, c.suspect, _, _, _,
                                 c.collect, c.collect, _, _, _),
    EventKind.WITHDRAWN:        (_, _, _, c.withdraw, _, _,
                                 _, _, _, _, _),
    EventKind.DECLARED:         (_, c.declare, c.declare, c.declare, c.declare_again, _,
                                 c.declare_draining, c.declare_only, _, _, _),
    EventKind.EVIDENCE_DONE:    (_, _, _, _, c.evidence_done, _,
                                 _, _, _, _, _),
    EventKind.RECOVERED:        (_, _, _, c.withdraw, c.recover, _,
                                 _, _, _, _, _),
    EventKind.EXITED:           (_, c.exited, c.exited, c.exited, c.exited_stalled, _,
                                 c.exited_draining, _, _, _, _),
    EventKind.TREE_GONE:        (c.note_gone, c.gone, c.gone, c.gone, c.gone_stalled, c.failed_gone,
                                 c.ended, c.ended, c.note_gone, c.note_gone, c.note_gone),
    EventKind.KILL_SURVIVED:    (c.unkillable, c.unkillable, c.unkillable, c.unkillable, c.unkillable, c.unkillable,
                                 c.unkillable, c.unkillable, c.unkillable, c.note_survivor, c.note_survivor),
    EventKind.STOP_ASKED:       (c.unwant, c.stop, c.stop, c.stop, c.stop_stalled, c.stop_down,
                                 c.stop, c.unwant, c.stop_down, c.stop_down, c.unwant),
    EventKind.DRAIN_ASKED:      (c.unwant, c.stop, c.drain, c.drain, c.drain_stalled, c.stop_down,
                                 _, c.unwant, c.stop_down, c.stop_down, c.unwant),
    EventKind.DRAINED:          (_, _, _, _, _, _,
                                 c.drained, _, _, _, _),
    EventKind.GRACE_OVER:       (_, _, _, _, _, _,
                                 c.drained, c.grace_over, _, _, _),
    EventKind.BACKOFF_OVER:     (_, _, _, _, _, _,
                                 _, _, c.backoff_over, _, _),
    EventKind.RESTART_ASKED:    (c.restart_down, c.restart, c.restart, c.restart, c.restart_stalled, c.restart_down,
                                 c.restart, c.restart_stopping, c.restart_down, c.restart_down, c.restart_down),
}
# fmt: on

TABLE: Mapping[EventKind, Mapping[State, Cell]] = {
    kind: dict(zip(State, cells, strict=True)) for kind, cells in _ROWS.items()
}
