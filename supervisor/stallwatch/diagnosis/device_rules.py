"""Rules about a thread that waits for an accelerator, and the last word when nothing fits. Pure."""

from __future__ import annotations

from dataclasses import replace

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis import describe, devices
from stallwatch.diagnosis import frames as fr
from stallwatch.diagnosis.call import Call, Facts
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.refine import HOST_WAIT
from stallwatch.diagnosis.vocabulary import prefixed


def device_wait(f: Facts) -> Call | None:
    """K01, with what the device itself did meanwhile, when somebody could ask it."""
    call = _device_wait(f)
    if call is None or call.kind is not Kind.DEVICE_WAIT:
        return call
    did = devices.said(f.scene.case.gpu, f.suspect.pid)
    return replace(call, reasons=(*call.reasons, did)) if did else call


def _device_wait(f: Facts) -> Call | None:
    """K01: asleep in a C call with the GIL free, where a device is at work, and not in a known wait."""
    lane = f.suspect.lane
    if lane is None or not f.scene.alive(lane) or f.suspect.hints:
        return None
    if lane.channel:
        return _channel_wait(f)
    if lane.phase.cls is not LaneClass.WORK and not _in_copy(f):
        return None
    if not f.words.touches_device(lane.role, lane.phase.name) or not f.thread.samples:
        return None
    thread, cpu = f.thread, f.thread.cpu or f.process.cpu
    if any(fr.polls_device(s.frames, f.words) for s in thread.samples):
        return _polls(f)
    if not thread.asleep or (cpu is not None and not cpu.idle) or thread.touched_gil:
        return None
    if thread.waits_for(f.words) or prefixed(thread.wchan, f.words.host_wchans):
        return None
    return _asleep_in_c(f)


def _asleep_in_c(f: Facts) -> Call:
    thread, words = f.thread, f.words
    cpu = thread.cpu or f.process.cpu
    top = thread.frame(words)
    reason = f"{thread.label} sleeps in a C call{describe.in_kernel(thread)} with the GIL free"
    reason += f", called from {top.name}" if top is not None else ""
    reasons = [reason]
    if cpu is not None:
        reasons.append(f"it used {cpu.seconds:.2f} s of CPU in {cpu.window_s:.1f} s")
    frames = [x.frames for x in thread.samples]
    library = next((n for x in frames if (n := fr.foreign_library(x, words))), "")
    call = next((c for x in frames if (c := fr.device_call(x, words)) is not None), None)
    if library:
        reasons.insert(1, f"its native frames are those of {library}, and of no lock of Python's")
    elif call is not None:
        reasons.insert(1, f"{call.name} is a call for the device")
    driver = thread.wchan.startswith(words.driver_wchans)
    if not (library or call is not None or driver):
        return _lock_or_device(f, reasons)
    if not f.process.gil_known:
        return Call(Kind.DEVICE_WAIT, "low", (*reasons, "who owns the GIL is not known"))
    sure = bool(library or driver) and cpu is not None
    return Call(Kind.DEVICE_WAIT, "high" if sure else "medium", tuple(reasons))


def _lock_or_device(f: Facts, reasons: list[str]) -> Call:
    """A threading.Lock sleeps in the same futex, and has no Python frame either: no name yet."""
    native = any(s.native for s in f.thread.samples)
    why = (
        "its native frames name no library: a lock of Python's would look the same"
        if native
        else "a lock of Python's would look the same: only native frames could tell"
    )
    return Call(
        Kind.UNKNOWN_STALL, "low", (reasons[0], why, *reasons[1:]), others=(Kind.DEVICE_WAIT,)
    )


def _in_copy(f: Facts) -> bool:
    return f.suspect.lane is not None and f.suspect.lane.phase.name.lower() in f.words.copy_phases


def _polls(f: Facts) -> Call:
    reason = f"{f.thread.label} polls a device event that does not complete"
    return Call(Kind.DEVICE_WAIT, "high" if len(f.thread.samples) > 1 else "medium", (reason,))


def _channel_wait(f: Facts) -> Call | None:
    """A device queue over its limit: its host thread is elsewhere, the queue does not advance."""
    lane = f.suspect.lane
    if lane is None or f.scene.moved(lane) or lane.phase.cls is LaneClass.IDLE:
        return None
    hosts = [x for x in f.scene.mates(lane) if x.tid == lane.tid and not x.channel]
    idle = bool(hosts) and all(x.phase.cls is LaneClass.IDLE for x in hosts)
    reason = f"the device queue {lane.address} has not advanced for {f.scene.age_s(lane):.1f} s"
    if idle:
        return Call(
            Kind.DEVICE_WAIT, "high", (reason, f"its host thread is idle ({hosts[0].address})")
        )
    return Call(Kind.DEVICE_WAIT, "medium", (reason,))


def unknown(f: Facts) -> Call:
    reasons = []
    thread = f.thread
    what = thread.waits_for(f.words) or prefixed(thread.wchan, f.words.host_wchans)
    if what and thread.asleep:
        top = thread.frame(f.words)
        called = f", called from {top.name}" if top is not None else ""
        reasons.append(f"{HOST_WAIT}: {thread.label} waits for {what}{called}")
    elif thread.samples and thread.cpu is not None and not thread.cpu.idle:
        share = thread.cpu.share
        reasons.append(
            f"{thread.label} uses {share:.2f} of a core, too little to call it a runaway"
        )
    elif f.suspect.pid and not thread.samples:
        reasons.append("there is no stack of its thread to judge by")
    return Call(Kind.UNKNOWN_STALL, "low", tuple(reasons))
