"""A worker stand-in that speaks the wire: what a prompt says is what it does. A process of its own.

A prompt is COMMAND or COMMAND:TEXT. Commands that give text send one token a message.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from tokenizers import Tokenizer

from stallwatch_engine.wire import (
    Abort,
    Failed,
    Ready,
    Stats,
    Submit,
    TokenLogprob,
    Tokens,
    WireError,
    WorkerEnd,
)

MAX_MODEL_LEN = 4096
MAX_SEQS = 4


class ScriptedWorker:
    def __init__(self, fd: int, folder: str) -> None:
        self.end = WorkerEnd.from_fd(fd)
        self.fd = fd
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.running: dict[int, Submit] = {}
        self.aborted: list[int] = []
        self.flooding: dict[int, int] = {}

    def run(self) -> None:
        self.end.send(
            Ready(
                architecture="scripted",
                device="cpu",
                dtype="float32",
                vocab_size=self.tokenizer.get_vocab_size(),
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_SEQS,
            )
        )
        while True:
            for message in self.end.receive(0.0 if self.flooding else 5.0):
                if isinstance(message, Abort):
                    self.aborted.append(message.id)
                    self.running.pop(message.id, None)
                    self.flooding.pop(message.id, None)
                    self.stats()
                else:
                    self.running[message.id] = message
                    self.obey(message)
            for request in list(self.flooding):
                self.flood(request)

    def stats(self) -> None:
        self.end.send(
            Stats(
                running=len(self.running),
                waiting=0,
                free_pages=100 - len(self.running),
                total_pages=100,
                steps=len(self.aborted),
            )
        )

    def obey(self, request: Submit) -> None:
        text = self.tokenizer.decode(request.prompt, skip_special_tokens=False)
        text = text.removeprefix("user: ").removesuffix("assistant:").strip()
        command, _, rest = text.partition(":")
        getattr(self, f"do_{command}", self.do_echo)(request, rest)

    def tokens(self, request: Submit, text: str, **more: Any) -> None:
        ids = self.tokenizer.encode(text).ids
        for token in ids:
            logprobs = None
            if request.sampling.logprobs is not None:
                top = [(token, -0.5), (ids[0], -1.5)][: request.sampling.logprobs]
                logprobs = [TokenLogprob(logprob=-0.5, top=top)]
            self.end.send(Tokens(id=request.id, ids=[token], logprobs=logprobs))

    def finish(self, request: Submit, reason: Any = "stop") -> None:
        self.running.pop(request.id, None)
        self.end.send(Tokens(id=request.id, ids=[], finish=reason))

    def do_echo(self, request: Submit, rest: str) -> None:
        self.tokens(request, rest)
        self.finish(request)

    def do_length(self, request: Submit, rest: str) -> None:
        self.tokens(request, rest)
        self.finish(request, "length")

    def do_sampling(self, request: Submit, rest: str) -> None:
        self.do_echo(request, json.dumps(request.sampling.model_dump()))

    def do_aborted(self, request: Submit, rest: str) -> None:
        self.do_echo(request, f"{len(self.aborted)} {sorted(self.running)}")

    def do_half(self, request: Submit, rest: str) -> None:
        """The first two bytes of a three-byte character, and the end."""
        ids = self.tokenizer.encode("x€").ids
        self.running.pop(request.id)
        self.end.send(Tokens(id=request.id, ids=ids[:3], finish="length"))

    def do_hang(self, request: Submit, rest: str) -> None:
        """Some text, then nothing."""
        self.tokens(request, rest)

    def do_late(self, request: Submit, rest: str) -> None:
        """Text that goes on after the end."""
        self.do_echo(request, rest)
        self.tokens(request, rest)
        self.end.send(Failed(id=request.id, reason="internal"))

    def do_paced(self, request: Submit, rest: str) -> None:
        """A few tokens a second, beside everything else."""

        def write() -> None:
            for letter in rest:
                self.tokens(request, letter)
                time.sleep(0.02)
            self.finish(request)

        threading.Thread(target=write, daemon=True).start()

    def do_flood(self, request: Submit, rest: str) -> None:
        """As much text as was asked for, as fast as it goes."""
        self.flooding[request.id] = request.sampling.max_tokens

    def flood(self, request: int) -> None:
        ids = self.tokenizer.encode("0123456789abcdef").ids
        left = self.flooding[request]
        take = min(left, len(ids))
        self.flooding[request] = left - take
        done = left == take
        wanted = self.running[request].sampling.logprobs
        entry = TokenLogprob(logprob=-1.0, top=[(t, -1.0) for t in range(wanted or 0)])
        logprobs = None if wanted is None else [entry] * take
        finish = "length" if done else None
        self.end.send(Tokens(id=request, ids=ids[:take], logprobs=logprobs, finish=finish))
        if done:
            del self.flooding[request], self.running[request]

    def do_nan(self, request: Submit, rest: str) -> None:
        self.running.pop(request.id)
        self.end.send(Failed(id=request.id, reason="nan_logits"))

    def do_spoil(self, request: Submit, rest: str) -> None:
        """NaN logits for every other request."""
        for other in [one for one in self.running if one != request.id]:
            del self.running[other]
            self.end.send(Failed(id=other, reason="nan_logits"))
        self.do_echo(request, rest)

    def do_fail(self, request: Submit, rest: str) -> None:
        self.running.pop(request.id)
        kind = "DEVICE_WAIT" if rest == "stalled" else None
        self.end.send(Failed(id=request.id, reason=rest, kind=kind))  # type: ignore[arg-type]

    def do_fail_all(self, request: Submit, rest: str) -> None:
        self.end.send(Failed(id=None, reason="stalled", message="copy", kind="DEVICE_WAIT"))

    def do_die(self, request: Submit, rest: str) -> None:
        self.tokens(request, rest)
        os._exit(9)

    def do_tear(self, request: Submit, rest: str) -> None:
        """A frame that never ends."""
        self.tokens(request, rest)
        os.write(self.fd, (100).to_bytes(4, "big") + b'{"type":"tok')
        os._exit(0)

    def do_garbage(self, request: Submit, rest: str) -> None:
        os.write(self.fd, b"\xff" * 64)

    def do_stranger(self, request: Submit, rest: str) -> None:
        self.end.send(Tokens(id=request.id + 1000, ids=[1]))

    def do_overrun(self, request: Submit, rest: str) -> None:
        """More tokens than were asked for: this request only."""
        self.end.send(Tokens(id=request.id, ids=[1] * (request.sampling.max_tokens + 1)))

    def do_alien(self, request: Submit, rest: str) -> None:
        self.end.send(Tokens(id=request.id, ids=[10**6]))


if __name__ == "__main__":
    try:
        ScriptedWorker(int(sys.argv[1]), sys.argv[2]).run()
    except WireError:
        sys.exit(0)
