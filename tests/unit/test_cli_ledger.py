"""Reports of a daemon that has ended."""

from __future__ import annotations

import json
import shutil

import pytest

from stallwatch.cli.ledger import LedgerFile
from stallwatch.cli.main import main
from stallwatch.errors import StallwatchError
from stallwatch.evidence.ledger import Ledger
from stallwatch.testing.service import stall_report

OLD = "st-20261130T031502Z-9f2c41aa"
NEW = "st-20261130T041502Z-00000001"


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """No daemon and no state of this machine's user is in reach."""
    for name in ("STALLWATCH_URL", "STALLWATCH_SOCKET", "STALLWATCH_TOKEN", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("stallwatch.paths.DEFAULT_CONTROL", "127.0.0.1:9")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "default"))
    return tmp_path


def fill(ledger: Ledger) -> None:
    """Two stalls, one with a file."""
    ledger.insert(stall_report(OLD))
    ledger.insert(stall_report(NEW, "code", "GIL_HELD"))
    ledger.artefact(OLD, "stacks-0.json", b"{}")


@pytest.fixture
def ended(tmp_path):
    """The state directory of a daemon that closed its ledger."""
    ledger = Ledger(tmp_path / "state")
    fill(ledger)
    ledger.close()
    return tmp_path / "state"


@pytest.fixture(params=["with index", "without index"])
def killed(tmp_path, request):
    """What a killed daemon leaves: pages that only the write-ahead log has."""
    ledger = Ledger(tmp_path / "alive")
    fill(ledger)
    shutil.copytree(tmp_path / "alive", tmp_path / "state")
    ledger.close()
    if request.param == "without index":
        (tmp_path / "state/stalls.db-shm").unlink()
    assert (tmp_path / "state/stalls.db-wal").stat().st_size
    return tmp_path / "state"


def content(folder):
    """Every file but the lock table of SQLite, and that table's name."""
    return {
        str(p): b"" if p.name.endswith("-shm") else p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_read_from_a_folder(ended, capsys):
    """`stalls`, `show` and `dump` read the ledger when no daemon answers, say so, change nothing."""
    before = content(ended)

    assert main(["stalls", "--state-dir", str(ended), "-o", "name"]) == 0
    found = capsys.readouterr()
    assert found.out.splitlines() == [NEW, OLD]
    assert found.err == f"no daemon answers; read from {ended}\n"
    assert main(["show", "last", "-o", "json", "--state-dir", str(ended)]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == NEW
    assert main(["show", "41aa", "--state-dir", str(ended)]) == 0
    assert "DEVICE_WAIT" in capsys.readouterr().out
    out = ended.parent / "out"
    assert main(["dump", OLD, "-o", str(out), "--state-dir", str(ended)]) == 0
    assert sorted(p.name for p in (out / OLD).iterdir()) == [
        "report.json",
        "report.txt",
        "stacks-0.json",
    ]
    assert main(["show", f"{OLD[:-1]}b", "--state-dir", str(ended)]) == 4
    assert content(ended) == before


def test_read_after_a_kill(killed):
    """What only the write-ahead log holds is read too, and no file is made beside it."""
    before = content(killed)

    assert [each["id"] for each in LedgerFile(str(killed)).stalls(10)] == [NEW, OLD]
    assert [each["id"] for each in LedgerFile(str(killed)).stalls(10, "chat")] == [OLD]
    assert content(killed) == before


def test_the_same_answer_as_the_ledger(ended):
    """A list, a report and file names are what the daemon would have said."""
    found = LedgerFile(str(ended))
    ledger = Ledger(ended)
    try:
        assert found.stalls(10) == ledger.summaries(10)
        assert found.report(OLD) == ledger.get(OLD)
        assert found.files(OLD) == [path.name for path in ledger.artefacts(OLD)]
        assert found.content(OLD, "stacks-0.json") == b"{}"
    finally:
        ledger.close()


def test_the_default_folder(home, capsys):
    """Without a flag it is the default state directory."""
    ledger = Ledger(home / "default")
    fill(ledger)
    ledger.close()

    assert main(["stalls", "-o", "name"]) == 0
    found = capsys.readouterr()
    assert found.out.splitlines() == [NEW, OLD]
    assert str(home / "default") in found.err


def test_a_given_address_is_not_replaced(home, capsys):
    """A named daemon that is gone is exit 5, unless its ledger lies beside its socket."""
    for folder in ("default", "own"):
        ledger = Ledger(home / folder)
        fill(ledger)
        ledger.close()

    assert main(["stalls", "--socket", str(home / "none.sock")]) == 5
    assert main(["stalls", "--url", "http://127.0.0.1:9"]) == 5
    assert "--state-dir DIR" in capsys.readouterr().err
    assert main(["stalls", "--socket", str(home / "own/control.sock")]) == 0
    assert f"read from {home / 'own'}\n" in capsys.readouterr().err


def test_no_ledger(home, capsys):
    """No daemon and no ledger is exit 5 with both sentences, and nothing is made."""
    assert main(["stalls", "--state-dir", str(home / "none")]) == 5
    err = capsys.readouterr().err
    assert "no daemon" in err
    assert "holds no ledger" in err
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("damage", ["text", "foreign", "folder", "report"])
def test_a_broken_ledger_is_said(ended, damage, capsys):
    """Damage is one sentence with exit 1, and stays as it is for whoever mends it."""
    path = ended / "stalls.db"
    if damage == "text":
        path.write_bytes(b"no database at all" * 100)
    elif damage == "report":
        path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema"!1'))
    else:
        path.unlink()
        import sqlite3

        if damage == "folder":
            path.mkdir()
        else:
            sqlite3.connect(path).close()
    before = content(ended)

    assert main(["show", OLD, "--state-dir", str(ended)]) == 1
    err = capsys.readouterr().err
    assert str(path) in err
    assert "internal error" not in err
    assert content(ended) == before


def test_a_ledger_in_use_is_said(ended, monkeypatch):
    """A lock that is held is named as such."""
    monkeypatch.setattr("stallwatch.cli.ledger._BUSY_S", 0.01)
    ledger = Ledger(ended)
    try:
        fill(ledger)
        assert ledger._db is not None
        ledger._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        ledger._db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StallwatchError, match="in use"):
            LedgerFile(str(ended))
    finally:
        ledger.close()


def test_an_empty_ledger(ended, home, capsys):
    """`last` of nothing says that nothing has stalled, with exit 4."""
    Ledger(home / "empty").close()
    for verb in ("show", "dump"):
        assert main([verb, "last", "--state-dir", str(home / "empty")]) == 4
        assert "the ledger is empty: nothing has stalled" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 3])
def test_serve_names_the_reports(code, monkeypatch, capsys, home):
    """A daemon that ends by itself leaves the command that reads its reports; an asked one does not."""
    from stallwatch import daemon

    (home / "a b").mkdir()
    ledger = Ledger(home / "a b")
    fill(ledger)
    ledger.close()
    monkeypatch.setattr(daemon, "run", lambda config: code)
    assert main(["serve", "--state-dir", f"{home}/a b", "--", "x"]) == code
    line = f"reports: stallwatch stalls --state-dir '{home}/a b'\n"
    assert capsys.readouterr().err == (line if code else "")


@pytest.mark.parametrize("found", ["nothing", "empty", "damaged"])
def test_serve_promises_no_reports_that_are_not_there(found, monkeypatch, capsys, home):
    """The disk was full, or took rubbish: it says so instead of pointing to an empty ledger."""
    from stallwatch import daemon

    state = home / "state"
    state.mkdir()
    if found == "empty":
        Ledger(state).close()
    elif found == "damaged":
        (state / "stalls.db").write_bytes(b"no database at all" * 100)
    monkeypatch.setattr(daemon, "run", lambda config: 1)
    assert main(["serve", "--state-dir", str(state), "--", "x"]) == 1
    said = capsys.readouterr().err
    assert "stallwatch stalls" not in said
    assert {"nothing": "", "empty": f"reports: none was kept in {state}\n"}.get(found, said) == said
    assert found != "damaged" or said.startswith("reports: none can be read: ")
