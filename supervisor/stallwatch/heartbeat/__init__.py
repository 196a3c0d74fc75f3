"""Heartbeats: how a process of an engine says what it is doing. Standard library only.

from stallwatch import heartbeat

board = heartbeat.attach(role="worker", rank=0)
lane = board.lane("model")
mark = lane.marker("execute_model", "step", "requests", limit=30.0)
mark(12, 4)
"""

from __future__ import annotations

import os

from stallwatch.heartbeat import layout
from stallwatch.heartbeat.board import Board, Pause, Role
from stallwatch.heartbeat.lane import Lane
from stallwatch.heartbeat.memory import open_board

__all__ = ["Board", "Failure", "Lane", "Pause", "Role", "attach"]

SIGURG = 23  # importing signal for one number would cost a millisecond

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stallwatch.heartbeat.failure import Failure

_attached: dict[str, Board] = {}


def attach(role: Role, rank: int = 0, *, dump_signal: int = SIGURG) -> Board:
    """The board of this process: the one in the folder that STALLWATCH_BOARD names.

    No such folder, full, unusable or of another version: a board whose methods do nothing, at the
    same cost. Never an exception. A second call in the same process returns the first board; a
    forked child that has said nothing yet may name its own role that way.

    role: a name, or a function that returns a name or (name, rank) and is asked at the first lane,
    and again in every forked child: at the time a child is born nobody knows yet what it will be.
    dump_signal: the signal that makes faulthandler write all stacks; 0: none.
    """
    folder = os.environ.get(layout.ENV, "")
    board = _attached.get(folder)
    if board is None or board.closed:
        if folder and "STALLWATCH_CHAOS" in os.environ:
            from stallwatch.heartbeat import chaos  # noqa: PLC0415  (never in production)

            chaos.arm()
        board = Board(open_board(folder) if folder else None, role, rank, dump_signal)
        _attached[folder] = board
    elif not board.attached:
        board.become(role, rank)
    return board


def __getattr__(name: str) -> object:
    if name == "Failure":  # its typing costs 5 ms of a 20 ms import
        from stallwatch.heartbeat.failure import Failure  # noqa: PLC0415

        return Failure
    raise AttributeError(name)
