"""Messages: what is packed comes back equal, and anything else is refused with the field's name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stallwatch_engine.wire import (
    Abort,
    Failed,
    PeerBroke,
    Ready,
    Sampling,
    Stats,
    Submit,
    TokenLogprob,
    Tokens,
)
from stallwatch_engine.wire.frame import HEADER
from stallwatch_engine.wire.messages import from_api, from_worker, pack

SUBMIT = Submit(
    id=1,
    prompt=[0, 5],
    sampling=Sampling(max_tokens=3, temperature=0.7, top_p=0.9, top_k=4, seed=-7, logprobs=2),
    deadline_ns=123,
)
READY = Ready(
    architecture="a", device="cpu", dtype="float32", vocab_size=9, max_model_len=8, max_num_seqs=1
)
TOKENS = Tokens(
    id=3,
    ids=[1],
    logprobs=[TokenLogprob(logprob=-0.25, top=[(1, -0.25), (2, -3.0)])],
    finish="stop",
)
STATS = Stats(running=1, waiting=2, free_pages=3, total_pages=4, steps=5)
FAILED = Failed(id=None, reason="stalled", message="copy", kind="DEVICE_WAIT")
ALL = [SUBMIT, Abort(id=2), TOKENS, FAILED, READY, STATS]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def read(message, payload: bytes):
    return (from_api if isinstance(message, Submit | Abort) else from_worker)(payload)


@pytest.mark.parametrize("message", ALL, ids=lambda message: message.type)
def test_every_message_comes_back_as_it_was_sent(message):
    """Both directions, all fields."""
    assert read(message, pack(message)[HEADER:]) == message


@pytest.mark.parametrize("message", ALL, ids=lambda message: message.type)
@given(data=st.data())
def test_one_spoilt_field_is_refused_or_harmless(message, data):
    """A field of any JSON value: a valid message of the same type, or a broken peer."""
    body = json.loads(message.model_dump_json())
    body[data.draw(st.sampled_from([*body, "more"]))] = data.draw(JSON)
    try:
        found = read(message, json.dumps(body).encode())
    except PeerBroke:
        return
    assert type(found) in {Submit, Abort, Tokens, Failed, Ready, Stats}
    assert pack(found)


@given(st.binary(max_size=80))
def test_random_bytes_are_a_broken_peer_in_either_direction(data):
    """Never another exception."""
    for receive in (from_api, from_worker):
        with pytest.raises(PeerBroke):
            receive(data)


@pytest.mark.parametrize("payload", [b"[" * 100_000, b'{"type":"abort","id":1e400}', b"NaN"])
def test_depth_and_numbers_beyond_reason_are_a_broken_peer(payload):
    """What breaks parsers breaks the conversation only."""
    with pytest.raises(PeerBroke):
        from_api(payload)


@pytest.mark.parametrize(
    ("message", "change", "field"),
    [
        (SUBMIT, {"prompt": []}, "prompt"),
        (SUBMIT, {"prompt": [-1]}, "prompt"),
        (SUBMIT, {"id": 0}, "id"),
        (SUBMIT, {"id": True}, "id"),
        (SUBMIT, {"id": "1"}, "id"),
        (SUBMIT, {"deadline_ns": -1}, "deadline_ns"),
        (TOKENS, {"logprobs": []}, "one logprob a token"),
        (TOKENS, {"ids": [], "logprobs": None, "finish": None}, "neither tokens nor an end"),
        (TOKENS, {"finish": "eos"}, "finish"),
        (TOKENS, {"logprobs": [{"logprob": 0.5, "top": []}]}, "logprob"),
        (FAILED, {"reason": "weather"}, "reason"),
        (READY, {"max_num_seqs": 0}, "max_num_seqs"),
        (STATS, {"free_pages": -1}, "free_pages"),
        (STATS, {"colour": 1}, "colour"),
    ],
)
def test_a_bad_field_is_named(message, change, field):
    """Whoever reads the log learns which field it was; the value, which may be a prompt, is not told."""
    body = json.loads(message.model_dump_json()) | change
    with pytest.raises(PeerBroke, match=field):
        read(message, json.dumps(body).encode())


def test_a_prompt_never_gets_into_the_complaint():
    """A log line is no place for what a client wrote."""
    body = json.loads(SUBMIT.model_dump_json()) | {"prompt": ["secret words"]}
    with pytest.raises(PeerBroke) as caught:
        from_api(json.dumps(body).encode())

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.1])
def test_a_worker_cannot_even_build_a_logprob_that_is_none(value):
    """NaN is found where it is made, not in a client's JSON."""
    with pytest.raises(ValidationError):
        TokenLogprob(logprob=value)
