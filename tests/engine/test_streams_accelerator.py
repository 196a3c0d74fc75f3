"""The thin layer over torch: what it adds is testable without a device, what torch does is not."""

from __future__ import annotations

import time

import pytest
import torch

from stallwatch_engine.streams.accelerator import AcceleratorEvent, AcceleratorStream
from stallwatch_engine.streams.errors import NotRecorded


def test_a_torch_event_that_was_never_recorded_is_an_error():
    """torch itself says that it is complete."""
    event = AcceleratorEvent(torch.device("cpu"), "inputs")
    assert torch.Event().query()
    with pytest.raises(NotRecorded):
        event.query()
    with pytest.raises(NotRecorded):
        event.synchronize(time.monotonic() + 1, "the copy")


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_a_device_copies_are_ordered_and_waits_bounded():
    """A copy behind a record is complete when the event is."""
    device = torch.accelerator.current_accelerator()
    stream, event = AcceleratorStream("model", device), AcceleratorEvent(device)
    source, target = torch.ones(1 << 20, device=device), torch.zeros(1 << 20)
    stream.enqueue("copy", lambda: target.copy_(source, non_blocking=True))
    event.record(stream)
    event.synchronize(time.monotonic() + 10, "the copy")
    assert target.sum() == 1 << 20
    stream.close(10)
