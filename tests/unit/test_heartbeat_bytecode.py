"""Between the two stores that frame an update, CPython must have no reason to do anything else."""

from __future__ import annotations

import dis
import inspect
import types

import pytest

from stallwatch.heartbeat import layout, marks
from stallwatch.heartbeat.cursor import Cursor

# What may stand between the stores: loads and stores. CALL, RESUME and JUMP_BACKWARD test the eval
# breaker; BINARY_OP could allocate, LOAD_ATTR could run a property.
HARMLESS = {
    "CACHE",
    "EXTENDED_ARG",
    "LOAD_CONST",
    "LOAD_SMALL_INT",
    "LOAD_DEREF",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_LOAD_FAST",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    "NOP",
    "STORE_SUBSCR",
}


def hot_functions() -> list[types.FunctionType]:
    cursor = Cursor()
    return [
        marks.marker(cursor, 1),
        marks.detail_marker(cursor, 1),
        marks.pusher(cursor, 1),
        marks.detail_pusher(cursor, 1),
        marks.popper(cursor),
        marks.progressor(cursor),
        marks.enterer(cursor),
        marks.deepener(cursor),
        marks.text_enterer(cursor),
    ]


def protected(function: types.FunctionType) -> list[str]:
    """The opcodes from the first store to the last one of the update, in the normal path."""
    lines, start = inspect.getsourcelines(function)
    stores = [
        start + i for i, line in enumerate(lines) if "] = " in line and "c.frames" not in line
    ]
    handler = next((start + i for i, line in enumerate(lines) if "except" in line), 1 << 30)
    code = list(dis.get_instructions(function))
    at = [
        i
        for i, op in enumerate(code)
        if op.opname == "STORE_SUBSCR"
        and op.positions.lineno in stores
        and op.positions.lineno < handler
    ]
    return [op.opname for op in code[at[0] : at[-1] + 1]]


@pytest.mark.parametrize("function", hot_functions(), ids=lambda f: f.__qualname__)
def test_nothing_but_plain_stores_stands_inside_an_update(function):
    """No opcode inside an update can switch threads, run a signal handler or collect garbage."""
    assert set(protected(function)) <= HARMLESS


def test_every_update_ends_with_the_time_that_makes_it_whole():
    """Each function that writes a frame sets its entry time to 0 first and to the time last."""
    for function in hot_functions():
        if function.__qualname__.startswith(("popper", "progressor")):
            continue
        lines, _ = inspect.getsourcelines(function)
        text = "".join(lines).partition("except")[0]
        frame = [line.strip() for line in text.splitlines() if line.strip().startswith("top[")]
        assert frame[0] == "top[0] = 0"
        assert frame[-1] == "top[0] = now"
        assert frame.count("top[0] = 0") == frame.count("top[0] = now") == 1


def test_literal_indexes_are_those_of_the_layout():
    """The numbers written into the hot path are the ABI's."""
    assert (layout.F_ENTERED, layout.F_WORD, layout.F_PROGRESS, layout.F_LIMIT) == (0, 1, 2, 3)
    assert (layout.F_DETAIL0, layout.F_DETAIL1) == (4, 5)
    assert (layout.L_DEPTH, layout.L_WORK) == (4, 5)
    assert layout.P_PENDING // 8 == 30
    assert layout.CONTROL // 8 == 32
