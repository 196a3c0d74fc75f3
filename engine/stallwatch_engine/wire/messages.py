"""The messages between api and worker. Every field is validated by the receiver; no pickle.

A request id is a number that the api counts up and never uses again, so that whoever meets an id
knows whether it is late (lower than the next one) or was never given.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from stallwatch_engine.wire.frame import PeerBroke, encode

MAX_PROMPT = 1 << 18
MAX_TOKENS_A_MESSAGE = 4096
MAX_TOP = 20
MAX_STOP_IDS = 64
SEED_LIMIT = 1 << 63

RequestId = Annotated[int, Field(ge=1, lt=1 << 53)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Logprob = Annotated[float, Field(le=0.0, ge=-1e30)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Sampling(_Message):
    """How the tokens of one request are chosen. temperature 0: greedy. top_k 0: all."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_PROMPT)]
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None  # how many beside the chosen
    ignore_eos: bool = False


class Submit(_Message):
    """A new request. deadline_ns: CLOCK_MONOTONIC, the same clock in every process of a host."""

    type: Literal["submit"] = "submit"
    id: RequestId
    prompt: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT)]
    sampling: Sampling
    deadline_ns: Count


class Abort(_Message):
    """Nobody wants the rest of this request: free what it holds. No answer is expected."""

    type: Literal["abort"] = "abort"
    id: RequestId


class TokenLogprob(_Message):
    """The log-probability of a sampled token, and those of the likeliest ones, best first."""

    logprob: Logprob
    top: Annotated[list[tuple[TokenId, Logprob]], Field(max_length=MAX_TOP)] = []


class Tokens(_Message):
    """Sampled tokens in order, an EOS included. `finish` is set in the request's last message."""

    type: Literal["tokens"] = "tokens"
    id: RequestId
    ids: Annotated[list[TokenId], Field(max_length=MAX_TOKENS_A_MESSAGE)]
    logprobs: Annotated[list[TokenLogprob], Field(max_length=MAX_TOKENS_A_MESSAGE)] | None = None
    finish: Literal["stop", "length"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.ids and self.finish is None:
            raise ValueError("neither tokens nor an end")
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError("one logprob a token")
        return self


Reason = Literal["nan_logits", "overload", "too_long", "deadline", "stalled", "internal"]


class Failed(_Message):
    """A request, or (id None) everything that this worker has, ends without a result.

    After a failure of everything the worker serves nobody any more.
    kind: the kind of stall, when reason is "stalled".
    """

    type: Literal["failed"] = "failed"
    id: RequestId | None
    reason: Reason
    message: Annotated[str, Field(max_length=1024)] = ""
    kind: Annotated[str, Field(max_length=64)] | None = None


class Ready(_Message):
    """The worker serves from now on. Sent once, before anything else."""

    type: Literal["ready"] = "ready"
    architecture: Name
    device: Name
    dtype: Name
    vocab_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    max_model_len: Annotated[int, Field(ge=2, le=MAX_PROMPT)]  # prompt and new tokens together
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)]


class Stats(_Message):
    """Gauges and counters of the worker, a few times a second. Pages are of the KV cache."""

    type: Literal["stats"] = "stats"
    running: Count
    waiting: Count
    free_pages: Count
    total_pages: Count
    steps: Count
    preemptions: Count = 0


ApiMessage = Annotated[Submit | Abort, Field(discriminator="type")]
WorkerMessage = Annotated[Tokens | Failed | Ready | Stats, Field(discriminator="type")]

_from_api: TypeAdapter[Submit | Abort] = TypeAdapter(ApiMessage)
_from_worker: TypeAdapter[Tokens | Failed | Ready | Stats] = TypeAdapter(WorkerMessage)


def pack(message: Submit | Abort | Tokens | Failed | Ready | Stats) -> bytes:
    """The message as a frame."""
    return encode(message.model_dump_json().encode())


def from_api(payload: bytes) -> Submit | Abort:
    """What the api said. PeerBroke when it is none of its messages."""
    try:
        return _from_api.validate_json(payload)
    except ValidationError as error:
        raise PeerBroke(f"the api sent no message: {_first(error)}") from None


def from_worker(payload: bytes) -> Tokens | Failed | Ready | Stats:
    """What the worker said. PeerBroke when it is none of its messages."""
    try:
        return _from_worker.validate_json(payload)
    except ValidationError as error:
        raise PeerBroke(f"the worker sent no message: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first complaint, without the value: it may hold a prompt."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:200]
