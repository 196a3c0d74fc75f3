from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stallwatch.process.output import Ring


@given(st.lists(st.binary(max_size=40), max_size=40))
def test_the_bounds_hold_for_any_output(chunks):
    """Lines, bytes and line length are bounded whatever arrives in whatever pieces."""
    ring = Ring(max_lines=5, max_bytes=60, max_line=16)
    for chunk in chunks:
        ring.feed(chunk)

        assert len(ring._lines) <= 5
        assert ring._size == sum(map(len, ring._lines)) <= 60
        assert len(ring._partial) <= 16


def test_lines_are_put_together_again():
    """A line that arrives in pieces is one line; the unfinished rest is shown last."""
    ring = Ring()
    for piece in (b"on", b"e\ntwo\r\nth", b"ree"):
        ring.feed(piece)

    assert ring.tail(9) == ("one", "two", "three")
    assert ring.tail(2) == ("two", "three")
    assert ring.tail(0) == ()


def test_a_line_without_end_is_cut_once():
    """Its beginning is kept with a mark, its rest dropped, and the next line is whole again."""
    ring = Ring(max_line=4)
    for _ in range(5):
        ring.feed(b"abcdef")
    ring.feed(b"\nnext\n")

    assert ring.tail(9) == ("abcd [cut]", "next")


def test_a_progress_bar_is_one_line():
    """Carriage returns overwrite: the last state is the line."""
    ring = Ring()
    ring.feed(b"1 %\r50 %\r100 %\n")

    assert ring.tail(1) == ("100 %",)


def test_bytes_that_are_no_text_do_no_harm():
    """Invalid UTF-8 is replaced."""
    ring = Ring()
    ring.feed(b"\xff\xfe\n")

    assert ring.tail(1) == ("\ufffd\ufffd",)
