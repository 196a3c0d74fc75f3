"""Prompts from files, chance and ShareGPT-like JSON; answers in pieces. Repeatable, bounded, refused by line."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.bench.chunk import BadAnswer, parse_chunk, plain
from stallwatch_engine.bench.errors import PlanRefused
from stallwatch_engine.bench.prompt import Message, Prompt
from stallwatch_engine.bench.sources import choose, from_file, from_random, from_sharegpt
from stallwatch_engine.bench.sse import MAX_EVENT, EventStream, Oversized

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "delta", "message", "text", "content", "usage", "error",
                         "completion_tokens", "finish_reason", "object"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


# -- prompts -------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), words=st.integers(1, 50))
def test_random_prompts_repeat_by_seed_and_have_their_length(seed, words):
    """Equal seeds give equal prompts, others give others; the length is exact."""
    first = from_random(5, words=words, max_tokens=4, seed=seed)
    assert first == from_random(5, words=words, max_tokens=4, seed=seed)
    assert first != from_random(5, words=words + 1, max_tokens=4, seed=seed)
    assert all(len(prompt.content.split()) == words for prompt in first)
    ids = from_random(3, words=words, max_tokens=4, seed=seed, vocab=17)
    assert all(len(prompt.content) == words for prompt in ids)
    assert all(0 <= token < 17 for prompt in ids for token in prompt.content)


def test_lines_of_a_text_file(tmp_path):
    """A prompt a line, blank lines left out."""
    (tmp_path / "p.txt").write_text("one\n\n  \ntwo words\n")
    found = from_file(tmp_path / "p.txt", max_tokens=9)
    assert found == [Prompt("one", 9), Prompt("two words", 9)]


def test_objects_of_a_jsonl_file(tmp_path):
    """Texts, ids and turns, each with its own length, expectation and time."""
    lines = [
        {"prompt": "a", "at": 1.5},
        {"prompt": [1, 2], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "b\u2028c"}], "expect": "d", "at": 2},
    ]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    (tmp_path / "p.jsonl").write_text(text)
    assert from_file(tmp_path / "p.jsonl", max_tokens=9) == [
        Prompt("a", 9, None, 1.5),
        Prompt((1, 2), 3),
        Prompt((Message("user", "b\u2028c"),), 9, "d", 2.0),
    ]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": 3}', '{"prompt": ["a"]}', '{"prompt": [true]}',
     '{"messages": []}', '{"messages": [{"role": "user"}]}', '{"messages": [{"role": 1, "content": "a"}]}',
     '{"prompt": "a", "max_tokens": 0}', '{"prompt": "a", "max_tokens": NaN}', '{"prompt": "a", "max_tokens": 1e999}',
     '{"prompt": "a", "at": "now"}', '{"prompt": "a", "expect": 4}', '{"messages": "hi"}'],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, line):
    """Whatever is wrong with it, the error says which line of which file."""
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(PlanRefused, match=r"p\.jsonl:2"):
        from_file(path, max_tokens=9)


def test_sharegpt_takes_the_first_answered_question(tmp_path):
    """Both spellings; the answer's length is the guess for max_tokens; what has no answer is left out."""
    value = [
        {"conversations": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a" * 41}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q2"},
                      {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"conversations": "none"}, 5, {"conversations": [7, None]},
    ]  # fmt: skip
    path = tmp_path / "s.json"
    path.write_text(json.dumps(value))
    assert from_sharegpt(path, max_tokens=None) == [Prompt("q1", 11), Prompt("q2", 1)]
    assert [prompt.max_tokens for prompt in from_sharegpt(path, max_tokens=5)] == [5, 5]
    path.write_text("{}")
    with pytest.raises(PlanRefused, match="no list"):
        from_sharegpt(path, max_tokens=None)


def test_choosing_repeats_shuffles_by_seed_and_refuses_nothing_to_choose():
    """Fewer prompts than asked for come again from the front; a seed gives one order."""
    prompts = [Prompt(str(n), 1) for n in range(20)]
    assert choose(prompts[:2], 5, seed=0, shuffle=False) == [*prompts[:2], *prompts[:2], prompts[0]]
    mixed = choose(prompts, None, seed=1, shuffle=True)
    assert mixed == choose(prompts, None, seed=1, shuffle=True) != prompts
    assert sorted(mixed, key=lambda p: int(p.content)) == prompts
    with pytest.raises(PlanRefused, match="none"):
        choose([], 3, seed=0, shuffle=False)


def test_a_file_that_cannot_be_read_is_an_error_of_its_name(tmp_path):
    """Missing, and no UTF-8."""
    with pytest.raises(PlanRefused, match=r"none\.txt"):
        from_file(tmp_path / "none.txt", max_tokens=1)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanRefused, match="UTF-8"):
        from_file(tmp_path / "b.txt", max_tokens=1)


# -- streams -------------------------------------------------------------------------------------


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["", "error", "x"]),
            st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=9), min_size=1, max_size=3),
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
)  # fmt: skip
def test_events_do_not_depend_on_how_the_body_is_cut(events, cuts, end):
    """However the bytes are split, also inside characters, the same events come out in order."""
    text = "".join(
        (f"event: {name}{end}" if name else f": ping{end}")
        + "".join(f"data: {line}{end}" for line in lines)
        + end
        for name, lines in events
    )
    body = text.encode()
    stream, found = EventStream(), []
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for start, stop in itertools.pairwise(edges):
        found += stream.feed(body[start:stop])
    assert found == [(name, "\n".join(lines)) for name, lines in events]
    assert not stream.partial


@pytest.mark.parametrize(
    "piece", [b"x" * 65536, b"data: " + b"y" * 65536 + b"\n", b"data\n" * 9000]
)
def test_an_endless_event_is_refused(piece):
    """A line or an event without end is an error before it fills the memory."""
    stream = EventStream()

    def feed_on():
        for _ in range(2 * MAX_EVENT // 9000 + 2):
            list(stream.feed(piece))

    with pytest.raises(Oversized):
        feed_on()


def test_a_cut_event_shows():
    """A body that ends inside an event leaves it partial."""
    stream = EventStream()
    assert list(stream.feed(b"data: 1\n\ndata: 2\n")) == [("", "1")]
    assert stream.partial


@given(value=JSON)
def test_any_json_is_a_chunk_or_a_bad_answer(value):
    """Nothing a server sends as JSON raises anything else, and counts are counts."""
    try:
        chunk = parse_chunk(json.dumps(value))
    except BadAnswer:
        assert not isinstance(value, dict)
        return
    assert isinstance(chunk.text, str)
    assert chunk.output_tokens is None or chunk.output_tokens >= 0


def test_a_servers_words_cannot_drive_a_terminal():
    """Controls become blanks and length is bounded."""
    assert plain("a\x1b[31m\nb\u202e") == "a [31m b "
    assert len(plain("x" * 10_000)) == 500
