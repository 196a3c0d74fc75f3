"""sd_notify(3): tell systemd how we are. Never raises, never blocks: it runs in the judging loop."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping


class Notifier:
    """The service manager's end of the conversation, or nothing when there is none.

    Taking the address removes it from the environment: an engine that we start must not be able to
    speak for us.
    """

    def __init__(self, env: MutableMapping[str, str] = os.environ) -> None:
        address = env.pop("NOTIFY_SOCKET", "")
        usec, pid = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        # half of the interval, as sd_watchdog_enabled(3) asks; 0.0: no watchdog
        good = ours and usec.isascii() and usec.isdigit() and len(usec) < 19
        self.watchdog_s = int(usec) / 2e6 if good else 0.0
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")) and len(address) > 1:
            try:
                kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
                self._socket = socket.socket(socket.AF_UNIX, kind)
            except OSError:
                self._socket = None

    @property
    def active(self) -> bool:
        """True when somebody asked to be notified."""
        return self._socket is not None

    def send(self, *lines: str) -> bool:
        """Send assignments. False: nobody listens or his queue is full; never an exception."""
        if self._socket is None:
            return False
        try:
            # one assignment a line: a newline in a value would be an assignment of its own
            text = "\n".join(" ".join(line.splitlines()) for line in lines)
            self._socket.sendto(text.encode("utf-8", "replace"), self._address)
        except (OSError, ValueError):
            return False
        return True

    def ready(self, status: str = "") -> bool:
        """Start-up, or a reload, is complete."""
        return self.send(
            "READY=1", f"MAINPID={os.getpid()}", *([f"STATUS={status}"] if status else [])
        )

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self.send(f"STATUS={text}")

    def watchdog(self) -> bool:
        """We live. Only the judging loop may say so, every `watchdog_s` seconds."""
        return self.send("WATCHDOG=1")

    def watchdog_failed(self) -> bool:
        """Ask for what a missed watchdog would bring, now."""
        return self.send("WATCHDOG=trigger")

    def extend(self, seconds: float) -> bool:
        """Start or stop needs this much more time, counted from now."""
        return self.send(f"EXTEND_TIMEOUT_USEC={max(0, int(seconds * 1e6))}")

    def reloading(self) -> bool:
        """A reload began; ready() ends it. Type=notify-reload compares the time with its own."""
        return self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        """We are going down."""
        return self.send("STOPPING=1", *([f"STATUS={status}"] if status else []))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
