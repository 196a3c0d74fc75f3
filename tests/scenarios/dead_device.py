"""A device whose driver never answers: whoever asks it cannot even be killed.

A file system in user space that accepts requests and answers none. The kernel waits for an answer
to a request that was handed over, whatever signal comes: a task in state D, as under a lost
accelerator or a dead file server. Closing the connection frees it. Needs root and /dev/fuse.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from pathlib import Path

DEVICE = "/dev/fuse"
_INIT = 26
_HEADER = struct.Struct("<IIQ")  # length, opcode, unique; more follows
_ANSWER = struct.Struct("<IiQ")  # length, error, unique
_WELCOME = struct.Struct("<IIIIHHIIHHI7I")
_NOSUID, _NODEV, _DETACH = 2, 4, 2
_BUFFER = 1 << 18


class DeadDevice:
    """Mounted until `close`, which may be called twice. OSError when this may not be mounted here."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "device"
        self.path.mkdir()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0"
        done = self._libc.mount(
            b"stallwatch-test", os.fsencode(self.path), b"fuse", _NOSUID | _NODEV, options.encode()
        )
        if done != 0:
            number = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(number, os.strerror(number), str(self.path))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Greets the kernel; takes everything else and keeps silent."""
        asked = select.poll()
        asked.register(self._fd, select.POLLIN)
        while not self._over.is_set():
            if not asked.poll(50):
                continue
            try:
                raw = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                continue
            except OSError:  # unmounted
                return
            _, opcode, unique = _HEADER.unpack_from(raw)
            if opcode == _INIT:
                body = _WELCOME.pack(7, 31, 0, 0, 16, 12, 4096, 1, 1, 0, 0, *(0,) * 7)
                os.write(self._fd, _ANSWER.pack(16 + len(body), 0, unique) + body)

    def close(self) -> None:
        """Whoever waits gets an error now, and dies if it was killed meanwhile."""
        if self._fd < 0:
            return
        self._over.set()
        self._thread.join(5)
        os.close(self._fd)  # the last descriptor: the kernel ends the connection
        self._fd = -1
        self._libc.umount2(os.fsencode(self.path), _DETACH)
