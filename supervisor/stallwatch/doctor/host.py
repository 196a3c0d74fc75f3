"""Checks of the machine: shared memory, logind, cgroup, clocks, limits, kernel, Python."""

from __future__ import annotations

import configparser
import fcntl
import os
import platform
import resource
import struct
import sys
import time
from pathlib import Path

from stallwatch.doctor.check import Result, fail, ok, warn

ROOT = Path("/")
MIB = 1 << 20
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, 64 bytes), Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def shm(path: Path = Path("/dev/shm")) -> Result:  # noqa: S108  (the board's own place)
    """Boards live there, and vLLM puts some 420 MB per start there."""
    name = "shared memory"
    remedy = (
        "mount a larger tmpfs; containers: --shm-size=8g or --ipc=host, or an emptyDir of Memory"
    )
    try:
        found = os.statvfs(path)
    except OSError as exc:
        return fail(name, f"{path}: {exc.strerror}", remedy)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{path}: {free // MIB} MiB free of {size // MIB} MiB"
    if not os.access(path, os.W_OK | os.X_OK):
        return fail(name, f"{path} is not writable", "mode 1777, or another user")
    if free < 16 * MIB:
        return fail(name, text, remedy)
    return warn(name, text, remedy) if free < 1024 * MIB else ok(name, text)


def remove_ipc(root: Path = ROOT, uid: int | None = None) -> Result:
    """Logind deletes a regular user's shared memory at his last logout: a board would vanish."""
    name = "logind RemoveIPC"
    uid = os.getuid() if uid is None else uid
    if not (root / "run/systemd/seats").is_dir() and not (root / "run/systemd/users").is_dir():
        return ok(name, "logind does not run here")
    if uid < 1000:
        return ok(name, f"does not concern uid {uid} (a system user)")
    value = "yes"
    folders = [root / "usr/lib/systemd", root / "run/systemd", root / "etc/systemd"]
    files = [folder / "logind.conf" for folder in folders]
    files += sorted(f for d in folders for f in (d / "logind.conf.d").glob("*.conf"))
    for file in files:
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
        try:
            parser.read_string(_read(file))
        except configparser.Error:
            continue
        value = parser.get("Login", "RemoveIPC", fallback=value) or value
    if value.lower() in ("no", "false", "off", "0"):
        return ok(name, "off")
    return warn(
        name,
        f"on: the shared memory of uid {uid} is deleted when that user logs out",
        "run as a system user, `loginctl enable-linger`, or RemoveIPC=no in logind.conf",
    )


def cgroup(root: Path = ROOT) -> Result:
    """cpu.stat is a witness that may extend a limit; memory.events tells an out-of-memory kill."""
    name = "cgroup"
    mount = root / "sys/fs/cgroup"
    if not (mount / "cgroup.controllers").exists():
        return warn(
            name,
            "not version 2: throttling and out-of-memory kills are read only in part",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )
    own = next(
        (
            line[3:]
            for line in _read(root / "proc/self/cgroup").splitlines()
            if line.startswith("0::")
        ),
        "/",
    )
    here = mount / own.lstrip("/")
    missing = [f for f in ("cpu.stat", "memory.events") if not os.access(here / f, os.R_OK)]
    if missing and own != "/":
        return warn(
            name, f"{' and '.join(missing)} not readable in {own}", "enable the controllers"
        )
    if not os.access(here / "cgroup.procs", os.W_OK):
        return warn(
            name,
            "version 2, not delegated: engines stay in our own group",
            "Delegate=yes in the unit of stallwatch",
        )
    return ok(name, f"version 2, delegated ({own})")


def clock(root: Path = ROOT) -> Result:
    """Monotonic time decides everything, so its source must be cheap and it must not have slept."""
    name = "clock"
    source = _read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    if source in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        return warn(
            name, f"the source is {source}: every mark costs about a microsecond more",
            "clocksource=tsc on the kernel's command line, if the machine's TSC is sound",
        )  # fmt: skip
    if asleep > 1.0:
        return warn(
            name, f"this machine was suspended for {asleep:.0f} s since its start",
            "limits do not count suspended time; disable suspend on a server",
        )  # fmt: skip
    return ok(name, f"{source or 'unknown source'}, never suspended")


def limits(root: Path = ROOT) -> Result:
    """An engine with many ranks needs files and processes; ours are counted in the same limits."""
    name = "limits"
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    cap = _read(root / "sys/fs/cgroup/pids.max")
    counts = [int(cap)] if cap.isdigit() else []
    counts += [tasks] if tasks != resource.RLIM_INFINITY else []
    room = min(counts, default=None)
    text = f"{files} files (hard {hard}), {room if room is not None else 'unlimited'} processes"
    if files < 256 or (room is not None and room < 128):
        return fail(name, text, "ulimit -n 65536, TasksMax=infinity or --pids-limit=-1")
    if files < 4096 or (room is not None and room < 2048):
        return warn(name, text, "LimitNOFILE=65536 and TasksMax=infinity in the unit")
    return ok(name, text)


def kernel() -> Result:
    """Pidfds name a process without a race; PIDFD_GET_INFO gives the exit status of a grandchild."""
    name = "kernel"
    release = platform.release()
    try:
        fd = os.pidfd_open(os.getpid())
    except OSError as exc:
        return fail(
            name, f"{release}: no pidfd ({exc.strerror})", "Linux 5.3 or newer, or a seccomp profile that allows it",
        )  # fmt: skip
    try:
        buffer = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(64, b"\0"))
        fcntl.ioctl(fd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return warn(
            name, f"{release}: pidfd, but no PIDFD_GET_INFO",
            "Linux 6.15 tells how a grandchild ended; older ones say unknown",
        )  # fmt: skip
    finally:
        os.close(fd)
    return ok(name, f"{release}: pidfd and PIDFD_GET_INFO")


def python() -> Result:
    """Which one runs us: py-spy is looked for beside it."""
    return ok("python", f"{platform.python_version()} at {sys.executable}")
