"""Where a scenario's supervisor keeps its socket."""

from __future__ import annotations

import os

import pytest

from stallwatch.chaos import scenario


@pytest.mark.parametrize("deep", [False, True])
def test_a_sockets_path_fits_wherever_tmpdir_is(tmp_path, monkeypatch, deep):
    """Below TMPDIR where that leaves room, elsewhere where not; the longest path that is used fits."""
    asked = tmp_path / ("d" * 100) if deep else tmp_path.parents[-2]
    asked.mkdir(exist_ok=True)
    monkeypatch.setattr(scenario.tempfile, "tempdir", str(asked))
    made = scenario.place()
    made.rmdir()

    assert (made.parent == asked) is not deep
    assert len(os.fsencode(made / "state" / "control.sock")) <= 107
