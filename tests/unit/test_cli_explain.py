"""`stallwatch explain` and the page that is generated from the same data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stallwatch.cli.main import main
from stallwatch.diagnosis.kinds import KINDS, Action, Kind, Remedy
from stallwatch.evidence import kindpage

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_has_a_page(kind, capsys):
    """Meaning, culprit, advice and action of the data are all in the text, in 80 columns."""
    assert main(["explain", kind]) == 0
    said = capsys.readouterr().out
    flat = " ".join(said.split()).lower()

    info = KINDS[kind]
    assert said.startswith(kind)
    assert info.code in said
    for text in (info.meaning, info.culprit, info.advice):
        assert " ".join(text.split()).lower().rstrip(".") in flat
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("given", ["GIL_HELD", "gil-held", "gil_held", "k08", "K08"])
def test_a_name_or_a_code_in_any_case(given, capsys):
    """The name as reports print it, in small letters, with hyphens, or the code."""
    assert main(["explain", given]) == 0
    assert capsys.readouterr().out.startswith("GIL_HELD  (K08)")


@pytest.mark.parametrize(
    ("given", "near"),
    [("GILHELD", "GIL_HELD"), ("DEVICE_WAITS", "DEVICE_WAIT"), ("lost", "LOST_WAKEUP")],
)
def test_an_unknown_kind_names_the_nearest(given, near, capsys):
    """Exit 2 like every wrong word on the line, nothing on stdout, and what was probably meant."""
    assert main(["explain", given]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert f"Did you mean '{near}'?" in found.err


def test_nothing_near_is_no_guess(capsys):
    """A word like no kind at all sends to the list; its escapes do not reach the terminal."""
    assert main(["explain", "\x1b[31mzzzz"]) == 2
    found = capsys.readouterr()
    assert "`stallwatch explain` lists them" in found.err
    assert "\x1b" not in found.err


def test_without_a_kind_all_are_listed(capsys):
    """One row a kind, in the order of the data."""
    assert main(["explain"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[-1] for row in rows] == [i.meaning.split()[-1] for i in KINDS.values()]
    assert main(["explain", "-o", "name"]) == 0
    assert capsys.readouterr().out.split() == [str(kind) for kind in Kind]


def test_json_is_the_data(capsys):
    """`-o json`: stable keys, of one kind and of all."""
    keys = ["kind", "code", "meaning", "culprit", "remedy", "action", "advice"]
    assert main(["explain", "K13", "-o", "json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert list(one) == keys
    assert (one["kind"], one["action"]) == ("STALE_LOCK_FILE", "fail")
    assert main(["explain", "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["items"]) == len(KINDS)


def test_every_remedy_and_action_has_words():
    """A new remedy or action without a sentence would break a page at three in the morning."""
    assert set(kindpage._REMEDIES) == set(Remedy)
    assert set(kindpage._ACTIONS) == set(Action)


def test_the_committed_page_is_the_generated_one():
    """docs/kinds.md is what the data says now; `scripts/make_docs.py` writes it."""
    assert (ROOT / "docs" / "kinds.md").read_text() == kindpage.markdown()


def test_the_check_fails_on_a_stale_page(tmp_path):
    """`make_docs.py --check` names a page that is not what the data says, and exits 1."""
    for name in ("scripts", "docs", "supervisor"):
        (tmp_path / name).mkdir()
    for copied in ("scripts/make_docs.py", "scripts/config_reference.py", "docs/configuration.md"):
        (tmp_path / copied).write_text((ROOT / copied).read_text())
    script = tmp_path / "scripts" / "make_docs.py"
    (tmp_path / "docs" / "kinds.md").write_text(kindpage.markdown() + "\nmore\n")
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'supervisor')!r}); sys.argv = ['x', '--check']\n"
    code += f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "docs/kinds.md is stale" in done.stderr
