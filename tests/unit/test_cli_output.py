"""Tables, ages and what may reach a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.cli import output
from stallwatch.cli.dump import safe_name
from stallwatch.cli.settings import Settings, parse_seconds
from stallwatch.cli.status import headline, short


@pytest.fixture
def told(monkeypatch):
    """The settings in force; no colours unless a test says so."""
    found = Settings()
    monkeypatch.setattr(output, "settings", lambda: found)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "-"),
        (float("nan"), "-"),
        (0.25, "0.2s"),
        (1, "1s"),
        (9.5, "9.5s"),
        (59.9, "59s"),
        (192, "3m12s"),
        (3600, "1h"),
        (7500, "2h5m"),
        (90061, "1d1h"),
        (3605, "1h"),
    ],
)
def test_age(seconds, text):
    """Ages have two units at most, as people say them."""
    assert output.age(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60.0),
        ("1m30s", 90.0),
        ("250ms", 0.25),
        ("5", 5.0),
        ("1.5h", 5400.0),
        ("", None),
        ("x", None),
        ("-1s", None),
        ("nan", None),
        ("1s2", None),
        ("inf", None),
        ("1" * 30, None),
    ],
)
def test_durations(text, seconds):
    """Durations have units; NaN, infinity and signs are none."""
    assert parse_seconds(text) == seconds


@given(st.text())
def test_nothing_drives_the_terminal(text):
    """No control character survives, whatever an engine wrote."""
    assert output.clean(text).isprintable()


@given(st.text(max_size=300))
def test_a_dumped_name_stays_in_its_folder(name):
    """No artefact name leaves the folder, hides, or is empty."""
    found = safe_name(name)

    assert found
    assert "/" not in found
    assert not found.startswith(".")


def test_nothing_is_cut_in_a_pipe(told, capsys):
    """What is no terminal gets whole lines."""
    output.table(("NAME", "WHY"), [("a", "x" * 200)])
    assert "x" * 200 in capsys.readouterr().out
    assert output.cut("x" * 200) == "x" * 200


def test_table_fits(told, capsys, monkeypatch):
    """On a terminal the last column is cut to fit in 80; columns are two blanks apart."""
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert len(output.cut("x" * 200)) == 80
    output.table(("NAME", "WHY"), [("a", "x" * 200), ("longer", "")])
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) == 80
    assert lines[0] == "NAME    WHY"
    assert lines[2] == "longer  -"


def test_colors(told, capsys, monkeypatch):
    """Colour is off for a pipe, on when forced, off for NO_COLOR and for the flag."""
    assert not output.colored()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert output.colored()
    output.table(("S", "X"), [("ready", "1")])
    assert "\x1b[32mready" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.colored()
    monkeypatch.delenv("NO_COLOR")
    told.color = False
    assert not output.colored()


def test_dumb_terminal(told, monkeypatch):
    """A terminal that says it is dumb gets no colours, another one does."""

    class Tty(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", Tty())
    monkeypatch.setenv("TERM", "dumb")
    assert not output.colored()
    monkeypatch.setenv("TERM", "xterm")
    assert output.colored()


def engine(name="chat", state="ready", **more):
    return {"name": name, "state": state, "reason": "", "exhausted_reason": "", **more}


@pytest.mark.parametrize(
    ("engines", "text"),
    [
        ([], "No engines."),
        ([engine()], "chat is ready."),
        ([engine(state="starting")], "chat is loading."),
        ([engine(), engine("b", "backoff")], "2 engines: 1 ready, 1 restarting."),
        ([engine(), engine("b", "stalled", reason="GIL_HELD")], "b is STALLED: GIL_HELD"),
        ([engine("a", "stalled"), engine("b", "unkillable")], "b is UNKILLABLE."),
    ],
)
def test_headline(engines, text):
    """One sentence says how things are, the worst first."""
    assert headline(engines) == text


def test_short_id():
    """The last digits name a stall."""
    assert short("st-20261130T031502Z-9f2c41aa") == "9f2c41aa"
    assert short("") == ""
