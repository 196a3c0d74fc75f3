"""What a kernel refuses, before it touches any memory. The caller's code must change, not its data.

Each error carries the kernel, the argument and what was expected, so that the message is the whole story.
"""

from __future__ import annotations


class KernelRefused(ValueError):
    """An argument that the kernel cannot take. Nothing was read or written."""

    def __init__(self, kernel: str, argument: str, problem: str) -> None:
        super().__init__(f"{kernel}: {argument} {problem}")
        self.kernel = kernel
        self.argument = argument
        self.problem = problem


class BadDtype(KernelRefused):
    """A tensor of a type that this kernel does not read."""


class BadShape(KernelRefused):
    """A tensor whose shape contradicts another argument."""


class BadLayout(KernelRefused):
    """A tensor on the wrong device, or with strides that this kernel does not walk."""


class BadIndex(KernelRefused):
    """An index outside of the table or buffer that it addresses."""


class BadScale(KernelRefused):
    """A scale that is NaN, infinite or of the wrong sign."""


class BadMetadata(KernelRefused):
    """Sizes, offsets or formats that contradict each other: refused, never guessed."""


class Busy(RuntimeError):
    """A kernel with buffers of its own was called while another thread was in it: bind one per thread."""

    def __init__(self, kernel: str) -> None:
        super().__init__(
            f"{kernel}: another thread is in this object, whose buffers serve one call"
        )
        self.kernel = kernel
