"""The folder of orders is the engine's too: what it puts there stops and misleads nobody."""

from __future__ import annotations

import os
import threading
import time

import pytest

from stallwatch.chaos import inject as chaos
from stallwatch.chaos.inject import Order, inject
from stallwatch.chaos.target import Aim
from stallwatch.errors import StallwatchError

STEM = "7-1"
AIM = Aim(7, 1, "worker:0", "worker", "model")
ORDER = Order("gil", 1.0, 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "TAKE_S", 0.2)
    (tmp_path / f"{STEM}.armed").touch()
    return tmp_path


def answering(folder, put) -> threading.Thread:
    """An engine that takes the order and does `put`."""

    def run() -> None:
        end = time.monotonic() + 5
        while not (folder / f"{STEM}.order").exists():
            assert time.monotonic() < end
        put(folder / f"{STEM}.began")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_pipe_in_place_of_the_answer_blocks_nobody(folder):
    """Opening a FIFO without a writer waits for ever; the order is taken back in time instead."""
    thread = answering(folder, os.mkfifo)
    with pytest.raises(StallwatchError):
        inject(ORDER, AIM, folder)
    thread.join()
    assert not (folder / f"{STEM}.order").exists()


@pytest.mark.parametrize("said", ["1", "-5", "9" * 19])
def test_a_moment_before_the_order_or_in_the_future_is_not_believed(folder, said):
    """The report card's latency is between two moments of ours."""
    before = time.monotonic_ns()
    thread = answering(folder, lambda path: path.write_text(said))
    began = inject(ORDER, AIM, folder)
    thread.join()
    assert before <= began <= time.monotonic_ns()


def test_a_link_in_place_of_the_order_is_not_followed(folder, tmp_path):
    """Nothing outside the folder is written to."""
    other = tmp_path / "other"
    other.write_text("mine")
    (folder / f"{STEM}.part").symlink_to(other)
    with pytest.raises(StallwatchError):
        inject(ORDER, AIM, folder)
    assert other.read_text() == "mine"
