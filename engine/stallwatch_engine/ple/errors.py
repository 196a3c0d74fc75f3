"""What goes wrong with PLE rows, named by who must act. None of them ever hands out old rows."""

from __future__ import annotations

from pathlib import Path


class PleFailed(RuntimeError):
    """The rows of this and every later step are lost: the engine must fail and be started again."""


class OffloadDied(PleFailed):
    """The offload process ended."""

    def __init__(self, pid: int, status: str) -> None:
        super().__init__(f"the PLE offload process {pid} ended ({status}); restart the engine")
        self.pid = pid
        self.status = status


class ProtocolBroken(PleFailed):
    """The other side said something that the protocol does not allow: a defect, not an overload."""


class StaleRows(PleFailed):
    """The rows in a buffer are not those of the step that asked for them."""

    def __init__(self, seq: int, found: int) -> None:
        super().__init__(
            f"PLE rows of step {seq} were asked for, and the buffer holds step {found}"
        )
        self.seq = seq
        self.found = found


class OutOfOrder(ValueError):
    """The caller names steps in an order that the interface does not allow. Nothing was changed."""


class RegistrationRefused(ValueError):
    """A rank described itself in a way that does not fit the table or the other ranks."""

    def __init__(self, rank: int, field: str, problem: str) -> None:
        super().__init__(f"PLE registration of rank {rank}: {field} {problem}")
        self.rank = rank
        self.field = field


class NoRoom(OSError):
    """Memory or disk is too small for what was asked; nothing was kept. The message names what to free."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class AnotherCheckpoint(RuntimeError):
    """The operator must choose another folder, or say that this one may be filled again."""

    def __init__(self, folder: Path, found: str, expected: str) -> None:
        super().__init__(
            f"{folder} holds the PLE tables of another checkpoint ({found[:12]}, not {expected[:12]}): "
            "name another folder, or allow it to be replaced"
        )
        self.folder = folder


class TableChanged(PleFailed):
    """A table file was cut short or replaced while it was served."""
