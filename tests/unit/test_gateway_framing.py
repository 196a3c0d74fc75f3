"""Where bodies end: whatever the pieces in which they come, and whatever a broken peer sends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.gateway.ends import complete
from stallwatch.gateway.framing import EVENT_ENDS, Chunked, Length, Malformed, UntilClose, chunk
from stallwatch.gateway.head import parse_request, parse_response

PAYLOADS = st.lists(st.binary(min_size=1, max_size=300), max_size=8)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


@given(
    payloads=PAYLOADS, cuts=st.lists(st.integers(0, 5000)), whole=st.booleans(), rest=st.binary()
)
def test_a_chunked_body_is_the_same_in_any_pieces(payloads, cuts, whole, rest):
    """What passes is byte for byte what came, its end is kept back, and what follows is no part of it."""
    end = b"0;x=1\r\nX-Sum: 1\r\n\r\n"
    body = b"".join(map(chunk, payloads))
    framing = Chunked(whole=whole)
    passed = b"".join(framing.feed(piece) for piece in pieces(body + end + rest, cuts))
    assert framing.done
    assert passed == body
    assert framing.terminator == end
    assert framing.rest == rest
    if whole:
        assert framing.tail == b"".join(payloads)[-64:]


@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 5000)))
def test_whole_chunks_only_pass(payloads, cuts):
    """At every moment an own chunk could follow what has passed, and `safe` ends an event."""
    framing = Chunked(whole=True)
    for piece in pieces(b"".join(map(chunk, payloads)), cuts):
        passed = framing.feed(piece)
        assert not framing.inside
        assert not passed or passed.endswith(b"\r\n")
        if framing.safe:
            assert passed[: framing.safe].endswith(tuple(e + b"\r\n" for e in EVENT_ENDS))


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400)))
def test_random_bytes_end_or_are_malformed(data, cuts):
    """Nothing but Malformed comes out of any bytes, and nothing is passed twice."""
    framing = Chunked(whole=False)
    passed = b""
    try:
        for piece in pieces(data, cuts):
            passed += framing.feed(piece)
    except Malformed as error:
        passed += error.passed
    assert data.startswith(passed)


@given(size=st.integers(0, 300), data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400)))
def test_a_length_is_a_length(size, data, cuts):
    """Exactly so many bytes are the body."""
    framing = Length(size)
    passed = b"".join(framing.feed(piece) for piece in pieces(data, cuts))
    assert passed == data[:size]
    assert framing.rest == data[size:]
    assert framing.done == (len(data) >= size)


def test_a_body_until_close_ends_only_there():
    """Nothing in it is an end; the close is."""
    framing = UntilClose()
    assert framing.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert not framing.done
    assert framing.close()


@given(data=st.binary(max_size=400))
def test_random_heads_are_judged_and_nothing_else(data):
    """A head is parsed or Malformed; no other exception exists."""
    for parse in (parse_request, lambda raw: parse_response(raw, b"POST")):
        try:
            parse(data + b"\r\n\r\n")
        except Malformed:
            pass


@pytest.mark.parametrize(
    ("path", "tail", "whole"),
    [
        (b"/v1/chat/completions", b"data: [DONE]\n\n", True),
        (b"/v1/chat/completions", b"data: [DONE]\r\n\r\n", True),
        (b"/v1/chat/completions", b'data: {"x": "[DONE]"}\n\n', False),
        (b"/v1/completions", b"data: {}\n\n", False),
        (b"/prefix/v1/completions/", b"", False),
        (b"/v1/responses", b"data: {}\n\n", True),
        (b"/metrics", b"", True),
    ],
)
def test_only_openai_streams_need_their_done(path, tail, whole):
    """Which streams must say [DONE], and that a token with that text is not it."""
    assert complete(path, tail) is whole
