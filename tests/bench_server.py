"""A server whose every answer is asked for by the prompt, for tests of the load generator.

The first word of a prompt says what it meets: `ok`, `never`, `headers`, `some`, `cut`, ... In a
test's own loop as `Server`; as a process by `python bench_server.py`, which prints its port,
answers GET /seen with the prompts so far, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Self

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FAILURE = {
    "error": {
        "message": "engine chat: step_result stuck for 31 s",
        "type": "engine_stalled",
        "code": "engine_stalled",
        "param": None,
        "failure_id": "st-20261130T031502Z-9f2c41aa",
        "kind": "ORDER_CYCLE",
    }
}
DEADLINE = {"error": {"message": "no answer", "type": "timeout_error", "code": "deadline_exceeded"}}
OTHER = {"error": {"message": "the request timed out, said nobody", "type": "server_error"}}


def whole(status: str, value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: object) -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    return chunked(f"data: {data}\n\n".encode())


def piece(text: str, finish: str | None = None, *, chat: bool = False) -> bytes:
    inner = {"delta": {"content": text}} if chat else {"text": text}
    return event({"choices": [{"index": 0, **inner, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE, END = event("[DONE]"), b"0\r\n\r\n"
ANSWER = {
    "choices": [{"index": 0, "text": "one two three", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}


class Server:
    """`seen` are the prompts in the order they came, `times` when; `gone` how many clients hung up."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.bodies: list[dict] = []
        self.times: list[float] = []
        self.gone = 0
        self.active = 0
        self.most_active = 0
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            self.gone += 1
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models"):
            writer.write(whole("200 OK", {"data": [{"id": "tiny"}]}))
            return True
        if head.startswith("GET /seen"):
            writer.write(whole("200 OK", self.seen))
            return True
        length = next(
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length")
        )
        body = json.loads(await reader.readexactly(length))
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        self.seen.append(prompt)
        self.bodies.append(body)
        self.times.append(asyncio.get_running_loop().time())
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._answer(prompt, body, reader, writer)
        finally:
            self.active -= 1

    async def _answer(self, prompt, body, reader, writer) -> bool:
        how, _, rest = prompt.partition(" ")
        chat = "messages" in body
        if how == "ok":
            if not body["stream"]:
                writer.write(whole("200 OK", ANSWER))
                return True
            writer.write(STREAM + piece("one ", chat=chat))
            if rest.startswith("slow"):
                await asyncio.sleep(float(rest.split()[1]))
            writer.write(piece("two ", chat=chat) + piece("three", "stop", chat=chat))
            writer.write(USAGE + DONE + END)
            await writer.drain()
            return True
        answers = {
            "408": whole("408 Request Timeout", OTHER),
            "504": whole("504 Gateway Timeout", OTHER),
            "stalled": whole("503 Service Unavailable", FAILURE),
            "deadline": STREAM + event(DEADLINE) + DONE + END,
            "refused": whole("400 Bad Request", {"error": {"message": "no", "code": "bad"}}),
            "broken": whole("500 Internal Server Error", OTHER),
            "stalled-stream": STREAM + piece("one ") + event(FAILURE),
            "error-event": STREAM + piece("one ") + event(OTHER) + DONE + END,
            "cut": STREAM + piece("one ") + piece("two", "stop") + END,
            "aborted": STREAM + piece("one "),
            "aborted-after-done": STREAM + piece("one ", "stop") + DONE,
            "given-up": STREAM + piece("one ", "abort") + DONE + END,
            "garbage": STREAM + event("{no json") + DONE + END,
            "page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi",
            "hung-up": b"",
        }
        if how in answers:
            if rest.startswith("after"):
                await asyncio.sleep(float(rest.split()[1]))
            writer.write(answers[how])
            await writer.drain()
            return False
        if how == "headers":
            writer.write(STREAM)
        elif how == "head-504":
            writer.write(b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 100\r\n\r\n")
        elif how == "some":
            writer.write(STREAM + piece("one "))
        else:
            assert how == "never", prompt
        await reader.read(1)  # until the client hangs up
        self.gone += 1
        return False


async def until(what) -> None:
    """Poll; the caller's deadline ends it."""
    while not what():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def _main() -> None:
    async with Server() as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
