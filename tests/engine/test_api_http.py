"""The HTTP interface, judged by the openai client, over a real api process and a scripted worker."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time

import openai
import psutil
import pytest

from api_helpers import MODEL, read_all, serving, write_checkpoint
from api_worker import MAX_MODEL_LEN, MAX_SEQS

pytestmark = [pytest.mark.process, pytest.mark.slow]
QUEUE = 8


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with serving(folder, "--queue", str(QUEUE), "--timeout", "60") as found:
        yield found
        assert found.process.poll() is None
        assert found.worker.poll() is None


@pytest.fixture
def client(api):
    with api.client() as found:
        yield found
    api.until(lambda: api.metric("requests_in_flight") == 0)


def complete(client, prompt, **more):
    return client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 200} | more)


def chat(client, text, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, **more)


def test_a_completion_is_the_workers_text_with_its_reason_and_usage(client):
    """finish_reason and token counts are the worker's."""
    stopped, cut = complete(client, "echo:héllo"), complete(client, "length:abc")

    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("héllo", "stop")
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("abc", "length")
    assert (
        stopped.usage.prompt_tokens,
        stopped.usage.completion_tokens,
        stopped.usage.total_tokens,
    ) == (11, 6, 17)


def test_token_ids_are_a_prompt_too(client):
    """As the interface allows: the ids of one prompt."""
    ids = [ord(letter) - 33 for letter in "echo"]  # byte-level: printable ASCII from 33 in order

    assert complete(client, [*ids, *(ord(c) - 33 for c in ":ok")]).choices[0].text == "ok"


def test_a_chat_answer_comes_through_the_template(client):
    """Roles and contents, parts of text included."""
    parts = [{"type": "text", "text": "echo:"}, {"type": "text", "text": "hi"}]
    message = chat(client, parts).choices[0].message

    assert (message.role, message.content) == ("assistant", "hi")


@pytest.mark.parametrize("text", ["plain", "é€😀 ∀x∈ℝ", "👩‍👩‍👧‍👦 family"])
def test_a_character_split_over_tokens_is_never_split_in_a_stream(client, text):
    """One byte a token: the pieces join to the text and none holds half a character."""
    pieces = [chunk.choices[0].text for chunk in complete(client, f"echo:{text}", stream=True)]

    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_that_never_gets_its_last_byte_is_shown_as_one_that_is_missing(client):
    """The text says that something was there, streamed or not."""
    whole = complete(client, "half").choices[0].text
    pieces = [chunk.choices[0].text for chunk in complete(client, "half", stream=True)]

    assert whole == "".join(pieces) == "x\N{REPLACEMENT CHARACTER}"


def test_a_chat_stream_names_its_role_first_and_its_usage_last(client):
    """role, pieces, finish_reason, then the chunk that stream_options asked for."""
    options = {"include_usage": True}
    chunks = list(chat(client, "echo:abc", stream=True, stream_options=options))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]

    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "abc"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_chunks_ends_the_text_and_frees_the_worker(api, client, stream):
    """The worker sends one letter a message and never ends by itself: the api ends it."""
    before = api.metric("worker_steps")  # the stand-in counts its aborts there
    found = complete(client, "hang:one<END>two", stop=["<END>", "zzz"], stream=stream)
    choices = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]

    assert "".join(choice.text for choice in choices) == "one"
    assert choices[-1].finish_reason == "stop"
    api.until(lambda: api.metric("worker_steps") == before + 1)
    assert api.metric("worker_running") == 0


def test_logprobs_have_the_interfaces_shape(client):
    """Chosen tokens, the likeliest ones beside them, offsets in characters; null for half characters."""
    old = complete(client, "echo:a€", logprobs=2).choices[0].logprobs
    new = chat(client, "echo:a€", logprobs=True, top_logprobs=1).choices[0].logprobs.content
    streamed = [
        info
        for chunk in chat(client, "echo:a€", logprobs=True, stream=True)
        for info in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]

    assert old.token_logprobs == [-0.5] * 4
    assert old.text_offset == [0, 1, 1, 1]
    assert old.top_logprobs[0] == {"a": -0.5}
    assert [list(b"a"), None, None, None] == [info.bytes for info in new]
    assert [len(info.top_logprobs) for info in new] == [1, 1, 1, 1]
    assert [info.logprob for info in streamed] == [-0.5] * 4


def test_sampling_parameters_arrive_at_the_worker(client):
    """What was asked for, not something like it."""
    more = {"top_k": 7, "ignore_eos": True}
    text = complete(client, "sampling", temperature=0.25, top_p=0.5, seed=-3, extra_body=more)
    found = json.loads(text.choices[0].text)

    wanted = {"max_tokens": 200, "temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": -3}
    assert wanted | {"logprobs": None, "ignore_eos": True} == found


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 3},
        {"suffix": "x"},
        {"logit_bias": {"1": 1}},
        {"extra_body": {"speculative_config": {"method": "mtp"}}},
        {"extra_body": {"min_tokens": 3}},
        {"user": "me"},
    ],
)
def test_what_is_not_supported_is_a_typed_error_that_names_it(client, more):
    """BadRequestError with `param`, never an answer that ignores it."""
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "echo:a", **more)
    names = more.get("extra_body", more)

    assert [caught.value.param] == list(names)


def test_tools_and_response_formats_are_refused_in_chat(client):
    """By name."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for more in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, "echo:a", **more)
        assert [caught.value.param] == list(more)


@pytest.mark.parametrize(
    ("length", "new", "param"),
    [
        (MAX_MODEL_LEN + 1, 1, "prompt"),
        (MAX_MODEL_LEN, 1, "prompt"),
        (100, MAX_MODEL_LEN, "max_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(client, length, new, param):
    """400 with the numbers, before anything is computed."""
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x" * length, max_tokens=new)

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    assert str(MAX_MODEL_LEN) in str(caught.value)


def test_exactly_the_capacity_fits(client):
    """The last token counts: no bound is one off."""
    prompt = "echo:" + "x" * 95
    found = complete(client, prompt, max_tokens=MAX_MODEL_LEN - len(prompt))

    assert found.choices[0].text == "x" * 95
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt, max_tokens=MAX_MODEL_LEN - len(prompt) + 1)


def test_the_wrong_model_path_or_method_is_an_error_object(api, client):
    """Even what no handler sees answers in the interface's form."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    status, body = api.get("/v1/completions")
    assert (status, json.loads(body)["error"]["code"]) == (405, "not_found")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", b"400"),
        (b"[]", b"400"),
        (b"\xff\xfe", b"400"),
        (b'{"model":"tiny","prompt":"a","temperature":NaN}', b"400"),
        (b"[" * 100_000, b"400"),
        (b'{"model":"tiny","prompt":"\\ud800"}', b"400"),
        (b'{"model":"\\ud800","prompt":"a"}', b"404"),
        (b'"' + b"x" * (5 << 20) + b'"', b"413"),
    ],
)
def test_a_body_that_is_none_is_refused(api, raw, status):
    """No parser's fault reaches the process."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=20) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        try:
            sock.sendall(head.encode() + raw)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all of it was sent
        assert sock.recv(64).split(b" ")[1] == status


def test_models_and_health_say_what_is_served(api, client):
    """The one model with its capacity; health is 200 while requests are taken."""
    (model,) = client.models.list().data

    assert (model.id, model.max_model_len) == (MODEL, MAX_MODEL_LEN)
    assert client.models.retrieve(MODEL).id == MODEL
    assert api.get("/health") == (200, '{"status":"ok"}')


def test_nan_logits_fail_their_request_only(client):
    """A neighbour that is being streamed meanwhile gets its whole answer."""
    neighbour = iter(complete(client, "paced:abcdefghij", stream=True))
    first = next(neighbour).choices[0].text
    with pytest.raises(openai.InternalServerError) as caught:
        complete(client, "nan:")

    assert (caught.value.status_code, caught.value.code) == (500, "nan_logits")
    assert first + "".join(chunk.choices[0].text for chunk in neighbour) == "abcdefghij"


REASONS = {
    "overload": (openai.RateLimitError, "overloaded"),
    "too_long": (openai.BadRequestError, "context_length_exceeded"),
    "deadline": (openai.APIStatusError, "deadline_exceeded"),
    "internal": (openai.InternalServerError, "internal_error"),
    "stalled": (openai.InternalServerError, "engine_stalled"),
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_workers_failure_before_the_first_token_has_its_status(client, reason, stream):
    """Streams too: their headers wait for the first output."""
    error, code = REASONS[reason]
    with pytest.raises(error) as caught:
        complete(client, f"fail:{reason}", stream=stream)

    assert caught.value.code == code
    if reason == "stalled":
        assert caught.value.body["kind"] == "DEVICE_WAIT"


def test_a_failure_inside_a_stream_is_an_error_not_an_end(client):
    """The client raises after the text it got; the text alone never looks complete."""
    texts: list[str] = []

    def read() -> None:
        for chunk in complete(client, "hang:abc", stream=True):
            texts.append(chunk.choices[0].text)
            assert chunk.choices[0].finish_reason is None
            if "".join(texts) == "abc":
                complete(client, "spoil:")

    with pytest.raises(openai.APIError, match="NaN"):
        read()

    assert "".join(texts) == "abc"


def test_a_failed_streams_body_has_no_final_chunk(api, client):
    """On the wire: an error event, neither [DONE] nor the end of the chunked body."""
    with api.raw({"prompt": "hang:a", "stream": True}) as sock:
        data = sock.recv(4096)
        complete(client, "spoil:")
        data += read_all(sock)

    assert b"200 OK" in data
    assert b'data: {"error":{' in data
    assert b"[DONE]" not in data
    assert not data.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("prompt", ["overrun", "alien"])
def test_output_that_cannot_be_is_the_workers_fault_and_that_requests_only(client, prompt):
    """500, and the next request is served."""
    with pytest.raises(openai.InternalServerError, match="not usable"):
        complete(client, prompt)

    assert complete(client, "echo:ok").choices[0].text == "ok"


def test_late_results_are_dropped_and_counted(api, client):
    """The text after the end reaches nobody."""
    before = api.metric('late_results_total{source="output"}')
    failures = api.metric('late_results_total{source="worker_failure"}')

    assert complete(client, "late:abc").choices[0].text == "abc"
    api.until(lambda: api.metric('late_results_total{source="output"}') == before + 3)
    api.until(lambda: api.metric('late_results_total{source="worker_failure"}') == failures + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_an_error_of_its_own_and_frees_the_worker(api, client, stream):
    """504 when nothing was sent, an error event otherwise; counted from arrival."""
    before = api.metric("worker_steps")
    began = time.monotonic()
    with pytest.raises(openai.APIError, match=r"0\.3 s"):
        list(complete(client, "hang:ab", stream=stream, extra_body={"timeout": 0.3}) or [])
    waited = time.monotonic() - began

    assert waited >= 0.3
    api.until(lambda: api.metric("worker_steps") == before + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slots(api, client, stream):
    """The worker is told to abort, whether or not anything was streamed."""
    before = api.metric("worker_steps")
    with api.raw({"prompt": "hang:abc", "stream": stream, "max_tokens": 100}) as sock:
        api.until(lambda: api.metric("requests_in_flight") == 1)
        if stream:
            assert sock.recv(64)
    api.until(lambda: api.metric("worker_steps") == before + 1)

    assert api.metric("worker_running") == 0
    assert api.metric("requests_in_flight") == 0


def test_overload_is_429_with_a_time_to_come_back(api, client):
    """Beyond the worker's sequences and the queue nothing is taken; room appears with the first end."""
    room = MAX_SEQS + QUEUE
    socks = [api.raw({"prompt": "hang"}) for _ in range(room)]
    try:
        api.until(lambda: api.metric("requests_in_flight") == room)
        with pytest.raises(openai.RateLimitError) as caught:
            complete(client, "echo:a")
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert api.get("/health")[0] == 200
        socks.pop().close()
        api.until(lambda: api.metric("requests_in_flight") == room - 1)
        assert complete(client, "echo:a").choices[0].text == "a"
    finally:
        for sock in socks:
            sock.close()


def test_many_clients_at_once_get_their_own_answers(api, client):
    """Streams and whole answers, each with its own text; those that are refused come back."""

    patient = client.with_options(max_retries=20)
    assert patient.completions  # imported on first use, which threads must not race for

    def ask(number: int) -> str:
        text = f"paced:{number:04d}"
        if number % 2:
            return complete(patient, text).choices[0].text
        return "".join(c.choices[0].text for c in complete(patient, text, stream=True))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(48)))

    assert found == [f"{number:04d}" for number in range(48)]


def test_a_reader_that_reads_nothing_costs_a_bounded_amount_of_memory(api, client):
    """Its request is ended once its unread output is over the bound; others are served meanwhile."""
    before = api.metric('requests_total{source="disconnect"}')
    process = psutil.Process(api.process.pid)
    rss = process.memory_info().rss
    body = {"prompt": "flood", "stream": True, "logprobs": 20, "max_tokens": 4000}
    socks = []
    try:
        for _ in range(3):
            socks.append(api.raw(body))
            assert complete(client, "echo:a").choices[0].text == "a"
        ended = 'requests_total{source="disconnect"}'
        api.until(lambda: api.metric(ended) == before + 3, seconds=30)
        assert api.metric("requests_in_flight") == 0
        assert process.memory_info().rss - rss < 32 << 20  # three times a few megabytes
    finally:
        for sock in socks:
            sock.close()
