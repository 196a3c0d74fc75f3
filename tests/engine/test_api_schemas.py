"""What is asked for is done or refused by name; nothing is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.api.errors import ApiError
from stallwatch_engine.api.schemas import NEUTRAL, ChatRequest, CompletionRequest, parse

COMPLETION = {"model": "m", "prompt": "p"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "c"}]}
BASES = [(CompletionRequest, COMPLETION), (ChatRequest, CHAT)]


def refusal(model, body) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(model, body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("model", "base"), BASES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("echo", True),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("logit_bias", {"1": 5}),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("speculative_config", {"method": "mtp"}),
        ("num_speculative_tokens", 2),
        ("use_beam_search", True),
        ("store", True),
        ("parallel_tool_calls", True),
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_name(model, base, name, value):
    """A client never gets one choice where it asked for two."""
    error = refusal(model, base | {name: value})

    assert error.param == name
    assert error.code == "unsupported_parameter"
    assert f"`{name}`" in error.message


@pytest.mark.parametrize(("model", "base"), BASES)
def test_a_value_that_asks_for_nothing_passes(model, base):
    """Clients send defaults: n=1, no tools, no bias, nulls."""
    neutral = {"n": 1, "tools": [], "logit_bias": {}, "presence_penalty": 0, "store": False}
    nulls = dict.fromkeys([*NEUTRAL, "stop", "seed", "temperature", "timeout"])
    formed = {"response_format": {"type": "text"}, "tool_choice": "none"}

    assert parse(model, base | nulls) == parse(model, base)
    assert parse(model, base | neutral | formed) == parse(model, base)


@pytest.mark.parametrize(("model", "base"), BASES)
@given(name=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12))
def test_an_unknown_parameter_is_refused_by_name(model, base, name):
    """A misspelt parameter has no silent effect."""
    if name in NEUTRAL or name in model.model_fields:
        return
    error = refusal(model, base | {name: 1})

    assert (name, "unknown_parameter") == (error.param, error.code)


@pytest.mark.parametrize(
    ("model", "change", "param"),
    [
        (CompletionRequest, {"temperature": -0.1}, "temperature"),
        (CompletionRequest, {"temperature": float("nan")}, "temperature"),
        (CompletionRequest, {"temperature": "1"}, "temperature"),
        (CompletionRequest, {"top_p": 0}, "top_p"),
        (CompletionRequest, {"max_tokens": 0}, "max_tokens"),
        (CompletionRequest, {"max_tokens": True}, "max_tokens"),
        (CompletionRequest, {"logprobs": 21}, "logprobs"),
        (CompletionRequest, {"stop": ""}, "stop"),
        (CompletionRequest, {"stop": ["a"] * 17}, "stop"),
        (CompletionRequest, {"timeout": 0}, "timeout"),
        (CompletionRequest, {"prompt": ["a", "b"]}, "prompt"),
        (CompletionRequest, {"prompt": []}, "prompt"),
        (CompletionRequest, {"prompt": [-1]}, "prompt"),
        (CompletionRequest, {"prompt": None}, "prompt"),
        (CompletionRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (ChatRequest, {"messages": []}, "messages"),
        (ChatRequest, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (ChatRequest, {"messages": [{"role": "user"}]}, "messages"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
        (ChatRequest, {"top_logprobs": 3}, "top_logprobs"),
        (ChatRequest, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_a_wrong_value_is_refused_with_its_parameter(model, change, param):
    """`param` says which one, as the interface has it."""
    base = COMPLETION if model is CompletionRequest else CHAT

    assert refusal(model, base | change).param == param


def test_a_name_inside_a_message_is_told_with_its_place():
    """`messages.0.name` leads to the field."""
    message = {"role": "user", "content": "x", "tool_calls": []}

    assert refusal(ChatRequest, CHAT | {"messages": [message]}).param == "messages.0.tool_calls"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_other_body_is_refused(body):
    """Never an exception of another kind."""
    refusal(CompletionRequest, body)


def test_parameters_reach_the_sampling_as_they_were_given():
    """Defaults are the interface's: temperature 1, 16 tokens for completions, all room for chat."""
    full = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 9, "max_tokens": 2, "logprobs": 4}
    given_ = parse(CompletionRequest, COMPLETION | full).sampling(100)
    bare = parse(CompletionRequest, COMPLETION).sampling(100)
    chat = parse(ChatRequest, CHAT | {"logprobs": True}).sampling(77)

    assert (
        given_.temperature,
        given_.top_p,
        given_.top_k,
        given_.seed,
        given_.max_tokens,
        given_.logprobs,
    ) == (0.0, 0.5, 3, 9, 2, 4)
    assert (bare.temperature, bare.max_tokens, bare.seed, bare.logprobs) == (1.0, 16, None, None)
    assert (chat.max_tokens, chat.logprobs) == (77, 0)
    assert parse(ChatRequest, CHAT | {"max_completion_tokens": 5}).sampling(77).max_tokens == 5
