"""The gateway before a real vLLM: nothing of an answer changes, and every client of a stall is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Self

import openai
import pytest
from running import available, free_port
from supervised import STALLWATCH, START_S, Supervised, until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not available(), reason="no vLLM environment here (make venv-vllm)"),
]

ASK = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = {**ASK, "messages": [{"role": "user", "content": "hello"}]}
# No prompt of one token: as the first request of a fresh vLLM 0.32 on a CPU with AMX it ends the worker with SIGILL.
RECORDED = {
    "models": ("GET", "/v1/models", None),
    "health": ("GET", "/health", None),
    "version": ("GET", "/version", None),
    "head": ("HEAD", "/health", None),
    "options": ("OPTIONS", "/v1/completions", None),
    "unknown path": ("POST", "/v1/no-such-thing", {}),
    "completion": ("POST", "/v1/completions", {**ASK, "prompt": "hello"}),
    "many": ("POST", "/v1/completions", {**ASK, "prompt": ["hello", "good day"]}),
    "stream": ("POST", "/v1/completions", {**ASK, "prompt": "hello", "stream": True}),
    "usage": (
        "POST",
        "/v1/completions",
        {**ASK, "prompt": "hello you", "stream": True, "stream_options": {"include_usage": True}},
    ),
    "no such model": ("POST", "/v1/completions", {**ASK, "model": "none", "prompt": "hello you"}),
    "too long": ("POST", "/v1/completions", {**ASK, "prompt": "hello you", "max_tokens": 10**6}),
    "no prompt": ("POST", "/v1/completions", {**ASK, "stream": True}),
    "no json": ("POST", "/v1/completions", "{"),
    "embeddings": ("POST", "/v1/embeddings", {"model": "tiny", "input": "x"}),
    "tokenize": ("POST", "/tokenize", {"model": "tiny", "prompt": "hello"}),
}


class Tee:
    """Between gateway and vLLM: passes everything on and keeps what vLLM said."""

    def __init__(self, upstream: int) -> None:
        self.said = bytearray()
        self.port = free_port()
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self._up.set()
        await self._stop.wait()
        server.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.ensure_future(self._pass(reader, back, keep=False)),
            asyncio.ensure_future(self._pass(far, writer, keep=True)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in (back, writer):
            end.close()
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool
    ) -> None:
        while data := await reader.read(65536):
            if keep:
                self.said += data
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


class Before:
    """A gateway of its own before a supervised vLLM."""

    def __init__(self, vllm: Supervised) -> None:
        self.vllm = vllm
        self.tee = Tee(vllm.port)
        self.port = free_port()
        control = vllm.folder / "state" / "control.sock"
        self.process = subprocess.Popen(
            [
                *(str(STALLWATCH), "gateway", "--listen", f"127.0.0.1:{self.port}"),
                *("--socket", str(control), "--upstream", f"chat=127.0.0.1:{self.tee.port}"),
                *("--drain", "1s", "--hold", "200s"),
            ]
        )
        until(self.served, seconds=20, what="the gateway serves")

    def served(self) -> bool:
        return self.vllm.get("/health", port=self.port)[0] == 200

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(15)
        self.tee.close()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Before]:
    vllm = Supervised(tmp_path_factory.mktemp("gateway"))
    try:
        vllm.wait_ready()
        found = Before(vllm)
        try:
            yield found
        finally:
            found.close()
    finally:
        vllm.end()


def ask(port: int, method: str, path: str, body: object) -> bytes:
    raw = (
        b""
        if body is None
        else body.encode()
        if isinstance(body, str)
        else json.dumps(body).encode()
    )
    head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nX-Request-Id: same\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(head.encode() + b"\r\n" + raw)
        sock.settimeout(60)
        got = b""
        while not _whole(got, method):
            data = sock.recv(65536)
            assert data, got
            got += data
        return got


def _whole(got: bytes, method: str) -> bool:
    head, end, body = got.partition(b"\r\n\r\n")
    low = head.lower()
    if not end or method == "HEAD":
        return bool(end)
    if b"chunked" in low:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(low.split(b"content-length:")[1].split(b"\r\n")[0])


@pytest.mark.parametrize("name", RECORDED)
def test_what_vllm_says_is_what_the_client_gets(front: Before, name: str) -> None:
    """Every byte between vLLM and the gateway, and between the gateway and its client, is the same."""
    front.vllm.ensure()
    until(front.served, seconds=START_S, what="the gateway serves")
    front.tee.said.clear()
    got = ask(front.port, *RECORDED[name])
    assert got == bytes(front.tee.said)
    assert got.startswith(b"HTTP/1.1 ")


class Crowd:
    """Clients of a library that applications use, one thread each; whatever happens, none outlives it."""

    def __init__(self, port: int) -> None:
        self.found: list[object] = []  # what each got: an answer or an error
        self.tokens: list[str] = []
        self._threads: list[threading.Thread] = []
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="k", timeout=200
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.join()
        finally:
            self._client.close()

    def start(self, *, stream: bool, length: int) -> None:
        thread = threading.Thread(target=self.ask, args=(stream, length))
        self._threads.append(thread)
        thread.start()

    def ask(self, stream: bool, length: int) -> None:
        try:
            answer = self._client.completions.create(
                model="tiny", prompt="hello", max_tokens=length, stream=stream,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            if stream:
                for chunk in answer:
                    self.tokens.append(chunk.choices[0].text)
            self.found.append(answer)
        except openai.APIError as error:
            self.found.append(error)

    def join(self, seconds: float = 210) -> None:
        for thread in self._threads:
            thread.join(seconds)
            assert not thread.is_alive(), "a client hangs"


def test_clients_of_a_stall_get_one_id_and_the_next_ones_an_answer(front: Before) -> None:
    """The API process and its engine are stopped with five clients inside: each gets the same
    failure as a typed error, none an answer cut short, and a sixth waits and is served.
    """
    front.vllm.ensure()
    until(front.served, seconds=START_S, what="the gateway serves")
    known = {s["id"] for s in front.vllm.stalls()}
    # Asked for now: between the last look at the clients and the stop nothing may take its time,
    # or a client has its whole answer by then.
    victims = [front.vllm.pid(address) for address in ("api:0", "core:0")]
    incarnation = front.vllm.engine()["incarnation"]
    with Crowd(front.port) as crowd:
        for number in range(5):
            crowd.start(stream=number < 3, length=3900)
        until(
            lambda: len(crowd.tokens) > 5 and front.vllm.pending("api:0") == 5,
            seconds=60,
            what="tokens flow, and five requests are in the engine",
        )
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        crowd.join(60)
        assert len(crowd.found) == 5
        assert all(isinstance(each, openai.APIError) for each in crowd.found), crowd.found
        ids = {each.body["failure_id"] for each in crowd.found}
        assert len(ids) == 1
        assert {s["id"] for s in front.vllm.stalls()} - known == ids
        crowd.found.clear()
        crowd.ask(stream=False, length=8)
        assert isinstance(crowd.found[0], openai.types.Completion), crowd.found
        front.vllm.wait_ready(incarnation + 1)
