"""Rules that rest on the CPU and the GIL: a sleeping owner, a thread that burns a core. Pure."""

from __future__ import annotations

from stallwatch.diagnosis import describe
from stallwatch.diagnosis.call import Call, Facts
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.signals import Thread

RUNAWAY_SHARE = 0.6  # of a core, with two or more samples in one function
RUNAWAY_ALONE = 0.8  # with one sample only
STARVED_SHARE = 0.2  # always runnable in three samples: a busy machine gave it less


def gil_held(f: Facts) -> Call | None:
    """K08: every beat of the process stops, and the GIL's owner is asleep."""
    owner = f.process.sleeping_owner
    if owner is None or not f.scene.silent(f.suspect.pid):
        return None
    cpu = owner.cpu or f.process.cpu
    reason = f"{owner.label} owns the GIL and is asleep{describe.in_kernel(owner)}"
    if cpu is None:
        return Call(Kind.GIL_HELD, "medium", (reason,), owner)
    reason += f" with {cpu.seconds:.2f} s of CPU in {cpu.window_s:.1f} s"
    return Call(Kind.GIL_HELD, "high" if cpu.idle else "medium", (reason,), owner)


def runaway(f: Facts) -> Call | None:
    """K07: the lane's thread burns a core; or a loop in C does, and keeps the GIL from all others."""
    thread = f.thread
    if not f.channel and (call := _burns(f, thread)) is not None:
        return call
    for owner in f.process.threads.values():
        if owner.tid == thread.tid or not owner.held_gil or not f.scene.silent(f.suspect.pid):
            continue
        # A thread that only takes turns with the GIL would let the lane's own thread run.
        call = _burns(f, owner)
        if call is not None and (thread.cpu is None or thread.cpu.idle):
            return call
    return None


def _burns(f: Facts, thread: Thread) -> Call | None:
    cpu, looks = thread.cpu, len(thread.samples)
    if cpu is None or thread.asleep:
        return None
    together = thread.same_function(f.words)
    enough = cpu.share >= RUNAWAY_ALONE or (looks >= 2 and cpu.share >= RUNAWAY_SHARE)
    starved = looks >= 3 and together and thread.running and cpu.share >= STARVED_SHARE
    if not (enough or starved):
        return None
    top = thread.frame(f.words)
    where = f" in {top.name}" if top is not None else ""
    reason = (
        f"{thread.label} used {cpu.seconds:.1f} s of CPU in {cpu.window_s:.1f} s"
        f" ({cpu.share:.2f} of a core){where}, in {describe.count(looks, 'sample')}"
    )
    role = f.suspect.role
    if (
        f.process.gil_known
        and not thread.touched_gil
        and f.words.touches_device(role, f.suspect.phase)
    ):
        # A driver that spins for the device looks like a native computation.
        why = "it never owned the GIL: a device wait that spins looks the same"
        return Call(
            Kind.UNKNOWN_STALL, "low", (reason, why), None, (Kind.CPU_RUNAWAY, Kind.DEVICE_WAIT)
        )
    sure = enough and together and looks >= 2
    return Call(Kind.CPU_RUNAWAY, "high" if sure else "medium", (reason,), thread)
