"""posix_spawn without the interpreter's lock.

os.posix_spawn keeps the GIL until the child's exec is done, and an exec waits for the file system
that holds the program: a server that does not answer would stop every thread of the daemon, the
judging one among them. A ctypes call gives the lock back; only the calling thread waits.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SETSIGDEF, _SETSIGMASK, _SETSID = 0x04, 0x08, 0x80  # glibc and musl agree
_ROOM = 1024  # posix_spawnattr_t takes 336 bytes, the file actions 80, in both
_SIGSET = 128
_DEFAULTS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def posix_spawn(
    path: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    output: int,
    close: Iterable[int] = (),
) -> int:
    """Start a program in a session of its own; returns its pid once it runs. Raises OSError.

    stdin is empty, stdout and stderr are `output`, `close` are descriptors that it must not get;
    every signal has its default action and none is blocked.
    """
    libc = _libc()
    pid = ctypes.c_int()
    actions, attributes = ctypes.create_string_buffer(_ROOM), ctypes.create_string_buffer(_ROOM)
    _check(libc.posix_spawn_file_actions_init(actions))
    try:
        _files(libc, actions, output, close)
        _check(libc.posix_spawnattr_init(attributes))
        try:
            _signals(libc, attributes)
            words, pairs = _strings(argv), _strings(f"{k}={v}" for k, v in env.items())
            place = os.fsencode(path)
            _check(libc.posix_spawn(ctypes.byref(pid), place, actions, attributes, words, pairs))
        finally:
            libc.posix_spawnattr_destroy(attributes)
    finally:
        libc.posix_spawn_file_actions_destroy(actions)
    return pid.value


def _files(libc: Any, actions: Any, output: int, close: Iterable[int]) -> None:
    null = os.fsencode(os.devnull)
    _check(libc.posix_spawn_file_actions_addopen(actions, 0, null, os.O_RDONLY, 0))
    for number in (1, 2):
        _check(libc.posix_spawn_file_actions_adddup2(actions, output, number))
    for number in close:
        _check(libc.posix_spawn_file_actions_addclose(actions, number))


def _signals(libc: Any, attributes: Any) -> None:
    none, default = ctypes.create_string_buffer(_SIGSET), ctypes.create_string_buffer(_SIGSET)
    libc.sigemptyset(none)
    libc.sigemptyset(default)
    for number in _DEFAULTS:
        libc.sigaddset(default, int(number))
    _check(libc.posix_spawnattr_setsigmask(attributes, none))
    _check(libc.posix_spawnattr_setsigdefault(attributes, default))
    flags = ctypes.c_short(_SETSIGDEF | _SETSIGMASK | _SETSID)
    _check(libc.posix_spawnattr_setflags(attributes, flags))


def _strings(items: Iterable[str]) -> Any:
    """A NULL-terminated array; the bytes live as long as it does."""
    found = [os.fsencode(item) for item in items]
    return (ctypes.c_char_p * (len(found) + 1))(*found, None)


def _check(number: int) -> None:
    """These functions return the error's number; errno says nothing."""
    if number:
        raise OSError(number, os.strerror(number))
