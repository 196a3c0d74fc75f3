"""Clients of a gateway that ask without end, and count in which way each of their requests ended."""

from __future__ import annotations

import collections
import http.client
import json
import random
import threading
from typing import Any

# None of one token: it ends a fresh vLLM 0.32 on a CPU with AMX (SIGILL).
PROMPTS = (
    "good day",
    "the quick brown fox",
    "1 2 3 4 5 6 7 8",
    "x" * 90,
    "Hello, who is there?",
    "zz zz",
)
TOKENS = 24
HANG_S = 120.0
THINK_S = 0.5  # the mean between two requests of one client
COMPLETE = "complete"


class End:
    """How one request ended. A word in capitals may not be."""

    def __init__(self, word: str, text: str = "", *, failure: str = "", tokens: int = 0) -> None:
        self.word, self.text, self.failure, self.tokens = word, text, failure, tokens


class Clients:
    """Threads that ask until told to stop; what became of each request, by kind of end.

    exact: there is one right text for each prompt. Otherwise the tokens are counted.
    """

    def __init__(self, port: int, count: int, *, exact: bool) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.truth: dict[str, End] = {}
        self.sent = 0
        self.answered = self.unexplained = self.told = 0  # as the gateway counts them
        self._port, self._exact = port, exact
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]

    def learn(self) -> None:
        """The right answers, from an engine in peace; streamed or not, they are the same."""
        for prompt in PROMPTS:
            for stream in (False, True):
                end = self._ask(prompt, stream=stream)
                if end.word != COMPLETE or end.tokens != TOKENS:
                    raise SystemExit(f"no answer in peace: {end.word}: {end.text[:300]}")
                if self._exact and self.truth.setdefault(prompt, end).text != end.text:
                    raise SystemExit(f"two answers to one prompt: {end.text[:300]}")
                self._count(end)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(HANG_S + 10)

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            prompt = chance.choice(PROMPTS)
            end = self._ask(prompt, stream=number % 4 != 3)
            if end.word == COMPLETE and not self._whole(prompt, end):
                end.word = "TRUNCATED"
            self._count(end)
            self._stop.wait(chance.uniform(0.0, 2 * THINK_S))

    def _whole(self, prompt: str, end: End) -> bool:
        if self._exact:
            return end.text == self.truth[prompt].text
        return end.tokens == TOKENS

    def _count(self, end: End) -> None:
        with self._lock:
            self.ends[end.word] += 1
            if end.failure:
                self.failures[end.failure] += 1
            if end.word == COMPLETE or end.word.startswith("engine's"):
                self.answered += 1
                if end.word.startswith("engine's own 500"):
                    self.faults.append(f"{end.word}: of a failure that has an id")
            elif end.word.endswith("unexplained"):
                self.unexplained += 1
            elif end.word.isupper():
                self.faults.append(f"{end.word}: {end.text[-200:]!r}")
            else:
                self.told += 1

    def _ask(self, prompt: str, *, stream: bool) -> End:
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HANG_S)
        with self._lock:
            self.sent += 1
        seen = End("CUT")
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                return _refused(response.status, json.loads(response.read())["error"])
            if not stream:
                return _answer(json.loads(response.read()))
            return _events(response, seen)
        except TimeoutError:
            return End("HUNG", seen.text)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            return End("CUT", f"{seen.text} {error!r}")
        finally:
            connection.close()


def _refused(status: int, error: dict[str, Any]) -> End:
    """An error object in place of an answer: the gateway's, or the engine's own."""
    return _told(str(status), error, "")


def _told(how: str, error: dict[str, Any], text: str) -> End:
    code, failure = str(error.get("code")), str(error.get("failure_id") or "")
    if code == "engine_stalled" and not failure:
        return End(f"{how} unexplained", text)
    ours = failure or code in (
        "engine_not_ready",
        "no_engine",
        "no_supervisor",
        "gateway_full",
        "gateway_stopping",
    )
    return End(f"{how} {code}" if ours else f"engine's own {how} {code}", text, failure=failure)


def _answer(said: dict[str, Any]) -> End:
    return End(COMPLETE, said["choices"][0]["text"], tokens=said["usage"]["completion_tokens"])


def _events(response: http.client.HTTPResponse, seen: End) -> End:
    """A stream, read to its end: the engine's own error event may be followed by the FAILURE behind it."""
    told: End | None = None
    try:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                response.read()  # who hangs up before the last chunk has left, by the gateway's count
                return told or End(COMPLETE, seen.text, tokens=seen.tokens)
            event = json.loads(data)
            if "error" in event:
                one = _told("event", event["error"], seen.text)
                told = one if told is None or one.failure else told
            if event.get("choices"):
                seen.text += event["choices"][0]["text"]
            if event.get("usage"):
                seen.tokens = event["usage"]["completion_tokens"]
    except (ConnectionError, http.client.HTTPException):
        if told is None:  # else it is how the gateway ends a stream that failed
            raise
    return told or End("CUT", seen.text)
