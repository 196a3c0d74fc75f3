"""The one way a CPU kernel is compiled, and the count of what was.

Every kernel is single-threaded and free of the GIL; threads come from `pool`, which cuts rows. The
machine code is cached on disk by numba; what an older source left there is dropped at import, since numba
notices a change of the caller's own file only. `signatures()` is how the engine proves that serving compiled
nothing: the set must not grow after the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

from stallwatch_kernels.stale import drop_stale_code

P = ParamSpec("P")
R = TypeVar("R")

_KERNELS: dict[str, Any] = {}

drop_stale_code()


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile on first use, IEEE arithmetic in source order."""
    return _compile(function, fastmath=False)


def reduction(function: Callable[P, R]) -> Callable[P, R]:
    """The same, but sums may be reassociated once, at compile time, so that a loop can use vectors.

    The order is then fixed in the machine code and depends on the length alone: still the same bits for
    the same row in any batch. Never for code that calls exp or tests for NaN or infinity.
    """
    return _compile(function, fastmath={"reassoc", "contract", "nsz"})


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """A scalar helper of kernels; no signature of its own is counted."""
    return cast("Callable[P, R]", _cached(function, inline="never"))


def signatures() -> dict[str, tuple[str, ...]]:
    """Every kernel by qualified name, with the argument types compiled so far."""
    return {
        name: tuple(sorted(str(s) for s in compiled.signatures))
        for name, compiled in sorted(_KERNELS.items())
    }


def _compile(function: Callable[P, R], *, fastmath: bool | set[str]) -> Callable[P, R]:
    compiled = _cached(function, fastmath=fastmath)
    _KERNELS[f"{function.__module__}.{function.__qualname__}"] = compiled
    return cast("Callable[P, R]", compiled)


def _cached(function: Callable[..., Any], **options: Any) -> Any:
    """Compiled lazily. On a read-only system without a home there is no place for a cache: then without one."""
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except (RuntimeError, OSError):  # "no locator available"; a NUMBA_CACHE_DIR that cannot be made
        return numba.njit(**options)(function)
