"""The panel as one native function, compiled once a process (or loaded from numba's cache) and called by address.

Called like any other compiled function its code, several hundred vector instructions, would be compiled
again into every caller and for every combination of integer types: minutes instead of seconds.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numba
from llvmlite import ir
from numba.core import types

from stallwatch_kernels.linear.panel import panel
from stallwatch_kernels.linear.vectors import I64, raw

_ARGUMENTS = 13
_TYPE = types.void(*([types.int64] * _ARGUMENTS))


@cache
def _compiled() -> Any:
    return numba.cfunc(_TYPE, cache=True, error_model="numpy")(panel)


def panel_address() -> int:
    """Where `panel` lies, for `call_panel`. The first call compiles it."""
    return cast("int", _compiled().address)


def _call(builder: Any, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64] * _ARGUMENTS)
    builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])


call_panel = raw(_call, _ARGUMENTS + 1)
"""`panel` from compiled code: its address first, then its own arguments."""
