"""Frames: whatever the cuts and whatever the bytes, a payload comes out whole or the peer is broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.wire import MAX_FRAME, PeerBroke
from stallwatch_engine.wire.frame import HEADER, FrameDecoder, encode

PAYLOADS = st.lists(st.binary(min_size=1, max_size=64), max_size=8)


@given(PAYLOADS, st.data())
def test_any_cut_of_the_stream_gives_the_same_payloads(payloads, data):
    """Torn frames: reads of any sizes yield exactly what was sent, in order."""
    stream = b"".join(encode(payload) for payload in payloads)
    decoder, found = FrameDecoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:size])
        stream = stream[size:]

    assert payloads == found
    assert not decoder.torn


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_random_bytes_give_payloads_or_a_broken_peer(chunks):
    """No other exception, and never more kept than one frame may hold."""
    decoder = FrameDecoder(max_frame=32)
    try:
        for chunk in chunks:
            for payload in decoder.feed(chunk):
                assert 0 < len(payload) <= 32
            assert len(decoder._buffer) < 32 + HEADER
    except PeerBroke:
        assert not decoder.torn


@pytest.mark.parametrize("size", [0, MAX_FRAME + 1, (1 << 32) - 1])
def test_an_impossible_length_is_refused_before_its_bytes_are_awaited(size):
    """A header alone is enough to end the conversation."""
    with pytest.raises(PeerBroke, match=str(size)):
        list(FrameDecoder().feed(size.to_bytes(HEADER, "big")))


@pytest.mark.parametrize("size", [0, MAX_FRAME + 1])
def test_a_sender_refuses_what_no_receiver_takes(size):
    """The fault is found where it is made."""
    with pytest.raises(ValueError, match=str(size)):
        encode(bytes(size))


def test_a_stream_that_ends_inside_a_frame_says_so():
    """torn is what tells a clean end from a death in mid-sentence."""
    decoder = FrameDecoder()

    assert list(decoder.feed(encode(b"abc")[:-1])) == []
    assert decoder.torn
