"""The ledger keeps the newest stalls, whatever happens to its disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import stat
import threading

import pytest

from stallwatch.errors import StateDirError
from stallwatch.evidence import ledger as module
from stallwatch.evidence.ledger import Ledger


class Wall:
    """A clock whose wall time the test sets."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def monotonic_ns(self) -> int:
        return 0

    def wall(self) -> float:
        return self.now


@pytest.fixture
def wall():
    return Wall()


@pytest.fixture
def make(tmp_path, wall):
    """Opens ledgers in one folder and closes them at the end."""
    opened = []

    def open_(**caps) -> Ledger:
        opened.append(Ledger(tmp_path / "state", clock=wall, **caps))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


def report(one: Ledger, wall: Wall, **over) -> dict:
    made = {"id": one.new_id(wall.now), "engine": "chat", "kind": "GIL_HELD"}
    return made | {"culprit": {"lane": "worker:0/model", "process": "worker:0"}} | over


def put(one: Ledger, wall: Wall, **over) -> str:
    made = report(one, wall, **over)
    assert one.insert(made) == ""
    return made["id"]


def test_a_report_comes_back_whole_also_after_a_restart(make, wall):
    """What was inserted is what get() gives, in this process and in the next."""
    one = make()
    made = report(one, wall, summary="ü \u2028", nested={"a": [1, None, 2.5]})
    assert one.insert(made) == ""
    assert one.get(made["id"]) == made
    one.close()
    assert make().get(made["id"]) == made
    assert make().get("st-20200101T000000Z-00000000") is None


def test_an_update_refines_and_keeps_the_place(make, wall):
    """The final refinement replaces the report under its id and does not become the newest."""
    one = make()
    first, second = put(one, wall, kind="UNKNOWN_STALL"), put(one, wall)
    assert one.update(first, {"engine": "chat", "kind": "DEVICE_WAIT"}) == ""
    assert [r["id"] for r in one.list()] == [second, first]
    assert one.get(first)["kind"] == "DEVICE_WAIT"


def test_the_list_is_newest_first_by_engine(make, wall):
    """list() filters by engine, keeps order and obeys its limit."""
    one = make()
    ids = [put(one, wall, engine=e) for e in ("a", "b", "a")]
    assert [r["id"] for r in one.list()] == ids[::-1]
    assert [r["id"] for r in one.list(engine="a")] == [ids[2], ids[0]]
    assert [r["id"] for r in one.list(1)] == [ids[2]]
    assert one.list(0) == []


def test_summaries_are_the_list_in_short(make, wall):
    """Summaries hold the same stalls in the same order, culprit as an address, memory included."""
    one = make()
    ids = [put(one, wall, engine=e, action="restart", incarnation=3) for e in ("a", "b")]
    one._db.execute("PRAGMA max_page_count=1")
    lost = report(one, wall, engine="a", fill="x" * 100_000)
    assert one.insert(lost) != ""
    found = one.summaries()
    assert [each["id"] for each in found] == [lost["id"], *ids[::-1]]
    assert found[1]["culprit"] == "worker:0/model"
    assert (found[1]["action"], found[1]["incarnation"]) == ("restart", 3)
    assert "fill" not in found[0]
    assert [each["id"] for each in one.summaries(1, "b")] == [ids[1]]


def test_ids_are_unique_and_have_the_documented_form(make, wall, monkeypatch):
    """An id that is in the table, or was given out already, is never given out again."""
    one = make()
    taken = put(one, wall)
    assert re.fullmatch(r"st-20270115T080000Z-[0-9a-f]{8}", taken)
    hexes = iter([taken[-8:], taken[-8:], "00000001", "00000001", "00000002"])
    monkeypatch.setattr(module.secrets, "token_hex", lambda n: next(hexes))
    assert one.new_id(wall.now)[-8:] == "00000001"
    assert one.new_id(wall.now)[-8:] == "00000002"


def test_files_and_folders_are_private(make, wall, tmp_path):
    """Nobody else may read: folders 0700, files 0600, the database and its journals too."""
    old = os.umask(0)
    try:
        one = make()
        stall = put(one, wall)
        one.artefact(stall, "stacks.json", b"[]")
        modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "state").rglob("*")}
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert {m for p, m in modes.items() if p.is_dir()} == {0o700}
    assert {m for p, m in modes.items() if p.is_file()} == {0o600}
    assert len(modes) >= 4


def test_artefacts_are_replaced_whole_and_listed(make, wall):
    """A second artefact of the same name replaces the first; no part file is listed."""
    one = make()
    stall = put(one, wall)
    one.artefact(stall, "b.txt", b"1")
    path = one.artefact(stall, "b.txt", b"22")
    one.artefact(stall, "a.txt", b"3")
    assert path.read_bytes() == b"22"
    assert [p.name for p in one.artefacts(stall)] == ["a.txt", "b.txt"]
    assert one.artefacts("../..") == ()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".hidden", "", "a/b", "a\0b", "x" * 99])
def test_an_artefact_cannot_leave_its_folder(make, wall, name):
    """Names with paths in them are a mistake of the caller, refused before any file is touched."""
    one = make()
    with pytest.raises(ValueError, match="not an artefact name"):
        one.artefact(put(one, wall), name, b"")


def test_retention_by_count_drops_the_oldest_with_its_files(make, wall, tmp_path):
    """Beyond max_items the oldest reports and their folders go."""
    one = make(max_items=3)
    ids = []
    for _ in range(5):
        ids.append(put(one, wall))
        one.artefact(ids[-1], "x", b"y")
    assert [r["id"] for r in one.list()] == ids[:1:-1]
    assert {p.name for p in (tmp_path / "state" / "stalls").iterdir()} == set(ids[2:])


def test_retention_by_bytes_counts_artefacts_and_spares_the_newest(make, wall):
    """The byte cap holds over reports and files together; the newest stays even if too large."""
    one = make(max_bytes=10_000)
    ids = [put(one, wall) for _ in range(3)]
    one.artefact(ids[0], "x", b"y" * 4000)
    assert len(one.list()) == 3
    one.artefact(ids[2], "x", b"y" * 9000)
    assert [r["id"] for r in one.list()] == [ids[2], ids[1]]
    one.artefact(ids[2], "z", b"y" * 90_000)
    assert [r["id"] for r in one.list()] == [ids[2]]


def test_repetition_is_counted_by_engine_kind_and_culprit(make, wall):
    """Only the same engine, kind and culprit within the window count."""
    one = make()
    put(one, wall)
    wall.now += 100
    put(one, wall)
    put(one, wall, kind="DEVICE_WAIT")
    put(one, wall, engine="other")
    put(one, wall, culprit={"lane": "", "process": "worker:1"})
    assert one.count_recent("chat", "GIL_HELD", "worker:0/model", 3600) == 2
    assert one.count_recent("chat", "GIL_HELD", "worker:0/model", 50) == 1
    assert one.count_recent("chat", "GIL_HELD", "worker:1", 50) == 1


def foreign(path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE somebody_elses (x)")
    db.close()


def newer(path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()


@pytest.mark.parametrize("damage", ["garbage", "cut", "foreign", "newer", "folder-page"])
def test_a_broken_or_foreign_database_is_moved_aside(make, wall, tmp_path, damage):
    """The old file is kept beside, the sentence says where, and a new ledger works at once."""
    one = make()
    for _ in range(20):
        put(one, wall, fill="x" * 4000)
    one.close()
    path = tmp_path / "state" / "stalls.db"
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 999)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "foreign":
        path.unlink()
        foreign(path)
    elif damage == "newer":
        newer(path)
    else:
        raw = bytearray(path.read_bytes())
        raw[4096:12288] = b"\xff" * 8192
        path.write_bytes(raw)
    before = path.read_bytes()
    again = make()
    assert "moved to" in again.problems[0]
    assert again.list() == []
    assert put(again, wall)
    (aside,) = (tmp_path / "state").glob("broken-*")
    assert (aside / "stalls.db").read_bytes() == before


def test_a_place_that_cannot_be_written_names_the_fix(tmp_path):
    """A file where the folder should be: StateDirError that names the setting to change."""
    (tmp_path / "state").write_text("")
    with pytest.raises(StateDirError) as caught:
        Ledger(tmp_path / "state")
    assert "state_dir" in str(caught.value)
    assert "Set [supervisor] state_dir" in caught.value.hint
    assert caught.value.exit_code == 78


def test_a_full_disk_keeps_reports_in_memory_and_writes_them_later(make, wall, monkeypatch):
    """While the database refuses, reports are served from memory; later they reach the disk."""
    one = make()
    good = put(one, wall)
    one._db.execute("PRAGMA max_page_count=1")
    lost = report(one, wall, fill="x" * 100_000)
    assert "kept in memory only: database or disk is full" in one.insert(lost)
    assert one.get(lost["id"]) == lost
    assert [r["id"] for r in one.list()] == [lost["id"], good]
    assert one.count_recent("chat", "GIL_HELD", "worker:0/model", 10) == 2
    one._db.execute("PRAGMA max_page_count=100000")
    newest = put(one, wall)
    assert [r["id"] for r in one.list()] == [newest, lost["id"], good]
    one.close()
    assert make().get(lost["id"]) == lost


def test_a_ledger_that_ends_names_what_the_disk_never_took(make, wall):
    """Written or lost: at the end each report is one of the two, and the lost ones are named."""
    one = make()
    good = put(one, wall)
    one._db.execute("PRAGMA max_page_count=1")
    lost = report(one, wall, fill="x" * 100_000)
    one.insert(lost)

    assert one.close() == (lost["id"],)
    assert [r["id"] for r in make().list()] == [good]


def test_what_is_in_memory_only_is_known_until_the_disk_takes_it(make, wall):
    """The reason is there for `status` as long as a report waits for room, and goes with it."""
    one = make()
    put(one, wall)
    assert one.memory_only == ""
    one._db.execute("PRAGMA max_page_count=1")
    one.insert(report(one, wall, fill="x" * 20_000))
    assert "full" in one.memory_only
    one._db.execute("PRAGMA max_page_count=100000")
    put(one, wall)
    assert one.memory_only == ""


def test_a_ledger_that_cannot_be_opened_is_known_before_the_first_report(make, monkeypatch):
    """An operator learns it from `status` now, not from the report that is missed later."""

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.database, "connect", full)
    assert "No space left on device" in make().memory_only


def test_memory_is_bounded_while_the_disk_is_full(make, wall):
    """However many reports the disk refuses, only the newest few are held."""
    one = make()
    one._db.execute("PRAGMA max_page_count=1")
    ids = [report(one, wall, fill="x" * 20_000) for _ in range(40)]
    for made in ids:
        assert one.insert(made) != ""
    assert [r["id"] for r in one.list()] == [m["id"] for m in ids[:23:-1]]


def test_a_refused_artefact_is_said_and_leaves_nothing(make, wall, tmp_path, monkeypatch):
    """No room for a file: None, a sentence, and no half-written file."""
    one = make()
    stall = put(one, wall)

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.Path, "replace", full)
    assert one.artefact(stall, "x", b"y") is None
    assert "No space left on device" in one.problems[-1]
    assert list((tmp_path / "state" / "stalls" / stall).iterdir()) == []


def test_a_broken_id_is_refused(make):
    """A report without a proper id would make a folder anywhere: refused."""
    with pytest.raises(ValueError, match="not a stall id"):
        make().insert({"id": "../../x"})


def test_files_of_unknown_stalls_are_swept(make, wall, tmp_path):
    """A folder whose report never came is removed at the next start; other things are not ours."""
    one = make()
    orphan = one.new_id(wall.now)
    one.artefact(orphan, "x", b"y")
    kept = put(one, wall)
    one.artefact(kept, "x", b"y")
    one.close()
    (tmp_path / "state" / "stalls" / "notes").mkdir()
    make()
    left = {p.name for p in (tmp_path / "state" / "stalls").iterdir()}
    assert left == {kept, "notes"}


def test_many_threads_may_write_at_once(make, wall):
    """Eight threads inserting and reading lose nothing."""
    one = make(max_items=1000)

    def work() -> None:
        for _ in range(20):
            put(one, wall)
            one.list(3)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(one.list(1000)) == 160
    assert not one.problems


def test_a_database_that_breaks_while_open_is_replaced(make, wall, tmp_path):
    """Damage during the run: one report waits in memory, then a new ledger takes it."""
    one = make()
    for _ in range(20):
        put(one, wall, fill="x" * 4000)
    one._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = tmp_path / "state" / "stalls.db"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    one._db.execute("PRAGMA shrink_memory")
    made = [report(one, wall) for _ in range(2)]
    for each in made:
        one.insert(each)
    assert "moved to" in "".join(one.problems)
    assert [r["id"] for r in one.list()] == [m["id"] for m in made[::-1]]
    one.close()
    assert len(make().list()) == 2


def test_a_removed_folder_is_made_again(make, wall, tmp_path):
    """Somebody deletes state_dir under a running supervisor: the next report is on disk again."""
    one = make()
    put(one, wall)
    shutil.rmtree(tmp_path / "state")
    kept = put(one, wall)
    assert one.artefact(kept, "x", b"y") is not None
    one.close()
    assert [r["id"] for r in make().list()] == [kept]
