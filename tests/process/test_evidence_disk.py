"""The ledger on real file systems that are full or read-only."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

PRELUDE = """
import pathlib, sys
from stallwatch.evidence.ledger import Ledger
from stallwatch.errors import StateDirError
folder = pathlib.Path(sys.argv[1])

"""
FULL_LATER = """
one = Ledger(folder / "s")
def report(size): return {"id": one.new_id(1.8e9), "engine": "e", "kind": "K", "x": "y" * size}
good, lost, last = report(1000), report(900_000), report(1000)
assert one.insert(good) == ""
said = one.insert(lost)
assert "kept in memory only" in said, said
assert one.artefact(good["id"], "big", b"z" * 900_000) is None
assert one.get(lost["id"]) == lost and one.get(good["id"]) == good
print("ok")
"""
FULL_BEFORE = """
ballast = folder / "ballast"
one_block = b"b" * 4096
try:
    with ballast.open("wb", buffering=0) as file:
        while True: file.write(one_block)
except OSError: pass
(folder / "s").mkdir(mode=0o700)
one = Ledger(folder / "s")
made = {"id": one.new_id(1.8e9), "engine": "e", "kind": "K"}
said = one.insert(made)
assert "kept in memory only" in said, said
assert one.get(made["id"]) == made
ballast.unlink()
after = {"id": one.new_id(1.8e9), "engine": "e", "kind": "K"}
assert one.insert(after) == "", list(one.problems)
one.close()
assert [r["id"] for r in Ledger(folder / "s").list()] == [after["id"], made["id"]]
print("ok")
"""
READ_ONLY = """
import subprocess
subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
try: Ledger(folder / "s")
except StateDirError as error: print("ok" if "Read-only" in str(error) and error.hint else error)
"""


@pytest.mark.parametrize(
    "body", [FULL_LATER, FULL_BEFORE, READ_ONLY], ids=["later", "before", "ro"]
)
def test_the_ledger_survives_its_disk(tmp_path, body):
    """Full later, full from the start, read-only: reports stay readable, or one clear error."""
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + body)
    folder = tmp_path / "disk"
    folder.mkdir()
    shell = f"mount -t tmpfs -o size=512k,mode=700 none {folder} && exec {sys.executable} {script} {folder}"
    argv = ["unshare", "--mount", "sh", "-c", shell]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=40, check=False)
    assert done.stdout.strip() == "ok", done.stderr
