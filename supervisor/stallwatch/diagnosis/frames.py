"""Reading one thread's frames: which one blocks, and whether it waits by design."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stallwatch.diagnosis.vocabulary import Vocabulary
from stallwatch.evidence.model import Frame

_STDLIB_HOME = re.compile(r"^.*/python3\.\d+t?/(?=(?!.*-packages/))")

_WORD = re.compile(r"[a-z]+")
# Parts of a function's name that say that it waits for somebody.
_WAITING = frozenset(
    {"acquire", "get", "join", "lock", "poll", "recv", "receive", "select", "synchronize", "wait"}
)
_CPYTHON_SOURCE = re.compile(r"/(Python|Objects|Modules|Parser|Include)/[^/]+\.[ch]$")


def is_python(frame: Frame) -> bool:
    """py-spy --native mixes C frames in; their file is a library or a C source."""
    name = frame.filename
    return name.endswith((".py", ".pyx", ".pyi", ".pyc")) or name.startswith("<")


def python_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(f for f in frames if is_python(f))


def native_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The C frames above the innermost Python frame: what that function is blocked in."""
    out: list[Frame] = []
    for frame in frames:
        if is_python(frame):
            break
        out.append(frame)
    return tuple(out)


def _path(frame: Frame) -> str:
    return "/" + frame.filename.lstrip("/")


def is_wrapper(frame: Frame, words: Vocabulary) -> bool:
    path = _path(frame)
    return any(part in path for part in words.wrapper_files)


def waiting_file(frame: Frame, words: Vocabulary) -> str:
    """What a frame of the standard library (or a known transport) waits for, or ''."""
    stdlib = _STDLIB_HOME.sub("", frame.filename)
    for name, what in words.waiting_stdlib:
        if stdlib == name:
            return what
    path = _path(frame)
    return next((what for end, what in words.waiting_packages if path.endswith(end)), "")


def informative(frames: Sequence[Frame], words: Vocabulary) -> Frame | None:
    """The innermost Python frame that names the function that blocks.

    Library waits and our own wrappers are looked through; if nothing else is there, the innermost.
    """
    python = python_frames(frames)
    for frame in python:
        if not waiting_file(frame, words) and not is_wrapper(frame, words):
            return frame
    return python[0] if python else (frames[0] if frames else None)


def waits_by_design(frames: Sequence[Frame], words: Vocabulary) -> str:
    """What the thread waits for on the host, as its frames say it; '' when they do not.

    A raw lock and time.sleep have no Python frame of their own, and a lock sleeps in the same futex
    as a semaphore of a C library: there, only native symbols tell.
    """
    for frame in native_frames(frames):
        for symbol, what in words.waiting_symbols:
            if frame.name.startswith(symbol):
                return what
    # The outermost of the leading library frames: "a queue", not the condition inside it.
    library = ""
    for frame in python_frames(frames):
        if is_wrapper(frame, words):
            continue
        what = waiting_file(frame, words)
        if not what:
            break
        library = what
    return library


def polls_device(frames: Sequence[Frame], words: Vocabulary) -> bool:
    """True when the innermost Python frame is a bounded wait for a device event."""
    python = python_frames(frames)
    return bool(python) and any(_path(python[0]).endswith(s) for s in words.device_poll_files)


def device_call(frames: Sequence[Frame], words: Vocabulary) -> Frame | None:
    """The innermost Python frame (wrappers apart), when it is itself a call for the device."""
    for frame in python_frames(frames):
        if is_wrapper(frame, words):
            continue
        path = _path(frame)
        host = any(part in path for part in words.device_call_not)
        filed = any(part in path for part in words.device_call_files) and not host
        named = frame.name.rpartition(".")[2] in words.device_call_names
        return frame if filed or named else None
    return None


def foreign_library(frames: Sequence[Frame], words: Vocabulary) -> str:
    """The library, neither C's nor Python's own, whose call the thread is blocked in; or ''.

    A stripped interpreter hides the names of its locks, so their absence alone proves nothing.
    """
    for frame in native_frames(frames):
        name = frame.name.lstrip("_")
        if name.startswith(words.device_symbols):
            return name
        if not _of_interpreter(frame, words):
            return _path(frame).rpartition("/")[2]
    return ""


def _of_interpreter(frame: Frame, words: Vocabulary) -> bool:
    path = _path(frame)
    if "/_ctypes" in path:
        return False  # whatever ctypes calls is not Python's
    return (
        not frame.filename
        or frame.filename == "?"
        or _CPYTHON_SOURCE.search(path) is not None
        or any(part in path for part in words.interpreter_files)
    )


def says_lock(frame: Frame, words: Vocabulary) -> bool:
    """A frame of a known lock-file library, or a function whose name speaks of a lock."""
    name = frame.name.rpartition(".")[2].lower()
    return _path(frame).endswith(words.lock_files) or any(x in name for x in words.lock_names)


def is_fork(frame: Frame, words: Vocabulary) -> bool:
    """A frame that is on the stack of a child only if it was forked."""
    return _STDLIB_HOME.sub("", frame.filename) in words.fork_files and frame.name.endswith(
        "_launch"
    )


def loads_kernel(frame: Frame, words: Vocabulary) -> bool:
    """A function that loads a kernel into a device."""
    return frame.name.rpartition(".")[2].startswith(words.kernel_loaders)


def in_collective(frames: Sequence[Frame], words: Vocabulary) -> bool:
    """True when one of the eight innermost Python frames is a collective operation."""
    return any(
        f.name.rpartition(".")[2] in words.collective_names for f in python_frames(frames)[:8]
    )


def shows_wait(frames: Sequence[Frame], words: Vocabulary) -> bool:
    """Any sign that the thread waits: a library's wait, a device's, a collective, or a name that says so."""
    if (
        waits_by_design(frames, words)
        or polls_device(frames, words)
        or in_collective(frames, words)
    ):
        return True
    if device_call(frames, words) is not None:
        return True
    inner = python_frames(frames)[:4]  # C's own names say "wait" in whatever sleeps
    named = (_WORD.findall(f.name.rpartition(".")[2].lower()) for f in inner)
    return any(word in _WAITING for name in named for word in name)


def common_function(stacks: Sequence[Sequence[Frame]]) -> Frame | None:
    """The deepest function (file and name, any line) that all samples share from the outside in."""
    lists = [tuple(reversed(python_frames(frames))) for frames in stacks]
    if not lists or not all(lists):
        return None
    deepest: Frame | None = None
    for level in zip(*lists, strict=False):
        if len({(f.name, f.filename) for f in level}) != 1:
            break
        deepest = level[0]
    return deepest
