from __future__ import annotations

import os
import select

import pytest

from process_helpers import subreaper
from stallwatch.errors import EngineStartError
from stallwatch.process.spawn import SpawnSpec, spawn
from stallwatch.testing import tree as trees
from stallwatch.testing.spawner import FakeSpawner

pytestmark = pytest.mark.process
SPEC = SpawnSpec(trees.argv("pass"), dict(os.environ))


def ended(child, timeout_ms):
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    return bool(poller.poll(timeout_ms))


@pytest.mark.parametrize("real", [True, False])
def test_both_spawners_tell_the_end_by_the_pidfd(real):
    """The fake's child behaves as a real one where it matters: its pidfd is readable at its end."""
    with subreaper() as reaper:
        fake = FakeSpawner()
        child = spawn(SPEC, hold=reaper.hold()) if real else fake(SPEC)
        if not real:
            assert not ended(child, 0)
            fake.end(child)

        assert ended(child, 10_000)
        assert ended(child, 0)
        if real:
            assert reaper.collect(child.pid, child.start_ticks, child.pidfd).code == 0
        fake.close()
        assert os.read(child.output, 1) == b""
        os.close(child.pidfd)
        os.close(child.output)


def test_the_fake_refuses_on_command():
    """A refusal is raised and the wish recorded."""
    fake = FakeSpawner()
    fake.refuse = EngineStartError("no")

    with pytest.raises(EngineStartError):
        fake(SPEC)
    assert fake.specs == [SPEC]
