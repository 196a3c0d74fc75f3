"""Admission: the first eligible implementation, the override, the reason."""

import logging
from itertools import count

import pytest

from stallwatch_kernels import admission
from stallwatch_kernels.admission import BadOverride, Choice, NoImplementation, choose

CANDIDATES = [("triton", "no GPU here"), ("numba", None), ("torch", None)]
_fresh = count()


def fresh_op() -> str:
    """An op that no other test has logged."""
    return f"op-{next(_fresh)}-{id(CANDIDATES)}"


def test_first_eligible_wins_and_says_why():
    """The first candidate without a refusal is chosen, and the reason names what stood before it."""
    assert choose("conv", CANDIDATES, environ={}) == Choice(
        "conv", "numba", "not triton: no GPU here"
    )
    assert choose("conv", CANDIDATES[1:], environ={}).reason == "preferred and eligible"


def test_override_takes_a_later_eligible_candidate():
    """STALLWATCH_KERNEL_<OP> moves the choice to another eligible implementation of that op alone."""
    environ = {"STALLWATCH_KERNEL_GDN_DECODE": "torch"}

    assert choose("gdn-decode", CANDIDATES, environ=environ).impl == "torch"
    assert choose("conv", CANDIDATES, environ=environ).impl == "numba"


@pytest.mark.parametrize(("wanted", "said"), [("triton", "no GPU here"), ("cuda", "no impl")])
def test_override_that_cannot_run_is_an_error_naming_the_choices(wanted, said):
    """An ineligible or unknown override raises, names itself and lists the choices: never a silent fallback."""
    with pytest.raises(BadOverride, match=said) as refused:
        choose("conv", CANDIDATES, environ={"STALLWATCH_KERNEL_CONV": wanted})

    assert refused.value.argument == "STALLWATCH_KERNEL_CONV"
    for name, _ in CANDIDATES:
        assert name in str(refused.value)


def test_nothing_eligible_holds_every_reason():
    """When all refuse, the error carries each refusal."""
    with pytest.raises(NoImplementation) as refused:
        choose("conv", [("a", "too wide"), ("b", "too old")], environ={})

    assert "a: too wide" in str(refused.value)
    assert "b: too old" in str(refused.value)


def test_each_distinct_choice_is_logged_once(caplog):
    """The same choice is logged at its first use only; another reason for the same op is logged again."""
    op = fresh_op()
    with caplog.at_level(logging.INFO, logger=admission.__name__):
        for _ in range(3):
            choose(op, CANDIDATES, environ={})
        choose(op, [("triton", "too few rows"), ("numba", None)], environ={})

    lines = [r.getMessage() for r in caplog.records if op in r.getMessage()]
    assert lines == [
        f"kernel {op}: numba (not triton: no GPU here)",
        f"kernel {op}: numba (not triton: too few rows)",
    ]


def test_memory_of_logged_choices_is_bounded():
    """Reasons that never repeat cannot make the process grow."""
    for number in range(3000):
        choose("conv", [("numba", f"reason {number}"), ("torch", None)], environ={})

    assert len(admission._logged) <= admission._LOGGED_AT_MOST
