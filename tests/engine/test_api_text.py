"""Tokenizer, chat template, incremental text and stop strings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api_helpers import PATHS, byte_tokenizer, write_checkpoint
from stallwatch_engine.api.detokenize import MAX_HELD, Detokenizer, StopScanner
from stallwatch_engine.api.generation import BadOutput, Generation
from stallwatch_engine.api.text import BadChat, BadTokenizer, TextCodec
from stallwatch_engine.wire import Sampling, TokenLogprob, Tokens

TOKENIZER = byte_tokenizer()
CODEC = TextCodec(TOKENIZER, None, {})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def stream(tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@given(TEXT)
def test_text_comes_out_in_whole_characters(text):
    """One token a byte: pieces join to the text and none holds half a character."""
    pieces = stream(TOKENIZER.encode(text).ids)

    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


@given(st.lists(st.one_of(TEXT.map(str.encode), st.binary(max_size=12)), max_size=6).map(b"".join))
@example(b"\x80" * 5 + b"\xe2\x82\xff\x80")  # what is given out early must not cut the e2 82
def test_any_bytes_give_what_the_tokenizer_gives_for_the_whole(raw):
    """A model may sample bytes that are no text: shown as U+FFFD as in one piece, nothing lost."""
    alphabet = {v: k for k, v in _byte_characters().items()}
    tokens = [TOKENIZER.token_to_id(alphabet[byte]) for byte in raw]

    assert "".join(stream(tokens)) == TOKENIZER.decode(tokens)


def test_bytes_that_are_no_text_are_not_held_back_for_ever():
    """Random bytes must not pile up unseen: their text comes after a few tokens."""
    token = TOKENIZER.encode("€").ids[1]
    pieces = stream([token] * 1000)
    silent = max(len(run) for run in "".join("x" if p == "" else "." for p in pieces).split("."))

    assert silent <= MAX_HELD


def test_special_tokens_have_no_text():
    """An EOS among the tokens is not shown."""
    eos = TOKENIZER.token_to_id("<|eos|>")

    assert "".join(stream([*TOKENIZER.encode("ab").ids, eos])) == "ab"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.text("abc", max_size=4), max_size=12), STOPS)
def test_a_stop_string_is_found_whatever_the_pieces(pieces, stops):
    """What is shown is the text up to the first place at which a stop string is complete."""
    scanner, shown = StopScanner(stops), ""
    for piece in pieces:
        for letter in piece:  # a token of one letter, so that "first complete" has one meaning
            shown += scanner.push(letter)
            assert not any(stop in shown for stop in stops)
    text = "".join(pieces)
    ends = [at for at in range(len(text) + 1) if any(text[:at].endswith(s) for s in stops)]
    if not ends:
        assert shown + scanner.flush() == text
        assert not scanner.stopped
        return
    first = text[: ends[0]]

    assert scanner.stopped
    assert shown == first[: min(first.find(s) for s in stops if s in first)]
    assert scanner.push("more") == scanner.flush() == ""


@given(st.lists(st.text("abc", max_size=5), max_size=8), STOPS)
def test_no_part_of_a_stop_string_is_shown_when_pieces_are_longer(pieces, stops):
    """Several letters in a piece: never a stop string in what is shown, and a prefix of the text."""
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(piece) for piece in pieces) + scanner.flush()
    text = "".join(pieces)

    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert scanner.stopped is any(stop in text for stop in stops)


def test_what_can_be_no_stop_string_is_shown_at_once():
    """Holding back costs latency: only a possible beginning is held."""
    scanner = StopScanner(["<end>"])

    assert scanner.push("text <") == "text "
    assert scanner.push("e") == ""
    assert scanner.push("x") == "<ex"


def generation(**sampling) -> Generation:
    return Generation(CODEC, Sampling(**{"max_tokens": 8, **sampling}), ["END"], vocab_size=300)


def tokens(text: str, **more) -> Tokens:
    return Tokens(id=1, ids=TOKENIZER.encode(text).ids, **more)


def test_a_generation_ends_at_its_stop_string_and_counts_no_token_after_it():
    """Run-ahead tokens behind the stop string are not the client's."""
    found = generation()
    delta = found.feed(tokens("abENDcd"))

    assert (delta.text, delta.tokens, found.tokens, found.finish) == ("ab", 5, 5, "stop")


def test_held_text_is_given_out_when_the_worker_ends():
    """ "EN" was only the beginning of a stop string, so at the end it is text."""
    found = generation()
    parts = [found.feed(tokens("abEN")), found.feed(Tokens(id=1, ids=[], finish="length"))]

    assert [part.text for part in parts] == ["ab", "EN"]
    assert found.finish == "length"


def test_a_padded_vocabulary_has_tokens_without_text():
    """Models round their vocabulary up: such a token is counted and shows nothing."""
    found = generation()
    a, *euro = TOKENIZER.encode("a€").ids

    assert found.feed(Tokens(id=1, ids=[a, 299, euro[0], 299, *euro[1:]])).text == "a€"
    assert found.tokens == 6


@pytest.mark.parametrize(
    ("sampling", "message", "why"),
    [
        ({"max_tokens": 1}, tokens("ab"), "over the 1 tokens"),
        ({}, Tokens(id=1, ids=[10**6]), "outside the vocabulary"),
        ({"logprobs": 1}, tokens("a"), "missing"),
        ({}, tokens("a", logprobs=[TokenLogprob(logprob=-1.0)]), "not asked for"),
        ({"logprobs": 0}, tokens("a", logprobs=[TokenLogprob(logprob=-1.0, top=[(1, -1.0)])]), "0"),
        (
            {"logprobs": 1},
            tokens("a", logprobs=[TokenLogprob(logprob=-1.0, top=[(10**6, -1.0)])]),
            "likely token outside",
        ),
    ],
)
def test_nothing_of_a_worker_is_trusted(sampling, message, why):
    """Output that the request cannot have is an error of the worker, named."""
    with pytest.raises(BadOutput, match=why):
        generation(**sampling).feed(message)


def test_a_checkpoints_template_gets_messages_and_special_tokens(tmp_path):
    """As its author wrote it, the prompt for an answer included."""
    folder = write_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{{ eos_token }}{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x') }}"
        "{% endif %}{{ m | tojson }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    codec = TextCodec.load(str(folder))

    assert codec.render([{"role": "user", "content": "é"}]) == (
        '<|eos|>{"role": "user", "content": "é"}>'
    )
    with pytest.raises(BadChat, match="no x"):
        codec.render([{"role": "x", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ messages[0].content.undefined.more }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path, template):
    """Neither Python's insides nor endless text: the request is refused, the process is well."""
    codec = TextCodec(TOKENIZER, template, {})
    with pytest.raises(BadChat):
        codec.render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", None, "No such file"),
        ("tokenizer_config.json", "[]", "no JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("chat_template.jinja", "{% for %}", "chat template"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, why):
    """One sentence with the path, for whoever repairs the checkpoint."""
    folder = write_checkpoint(tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(BadTokenizer, match=why) as caught:
        TextCodec.load(str(folder))

    assert str(folder) in str(caught.value)


def test_without_a_template_chat_is_refused():
    """No template is guessed."""
    with pytest.raises(BadChat, match="no chat template"):
        CODEC.render([{"role": "user", "content": "a"}])


def test_a_template_may_stand_in_the_tokenizers_configuration(tmp_path):
    """The older place; the file of its own wins."""
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))

    assert TextCodec.load(str(folder)).render([]) != "old"
    (folder / "chat_template.jinja").unlink()
    assert TextCodec.load(str(folder)).render([]) == "old"


@pytest.mark.process
@pytest.mark.slow
def test_the_api_process_imports_no_torch():
    """It starts in a moment and stays small: tokenizer and template need neither torch nor models."""
    code = "import sys, stallwatch_engine.api.main; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env={"PYTHONPATH": PATHS}, timeout=50
    )

    assert done.returncode == 0


def _byte_characters() -> dict[str, int]:
    """Which character stands for which byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in shown}
    others = [byte for byte in range(256) if byte not in shown]
    return table | {chr(256 + at): byte for at, byte in enumerate(others)}
