"""What clients may ask for. Everything else is refused by name, never ignored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stallwatch_engine.api.errors import ApiError, refused
from stallwatch_engine.wire import Sampling

MAX_TIMEOUT_S = 86400.0
COMPLETION_TOKENS = 16  # the default of the original interface

Strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Stop = Annotated[str, Field(min_length=1, max_length=512)]


class StreamOptions(BaseModel):
    model_config = Strict
    include_usage: bool = False


class _Request(BaseModel, ABC):
    """What both interfaces share."""

    model_config = Strict

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool = False
    timeout: Annotated[float, Field(gt=0.0, le=MAX_TIMEOUT_S)] | None = None  # seconds

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """How many log-probabilities of each token, or None."""

    @abstractmethod
    def new_tokens(self, room: int) -> int:
        """How many tokens may be generated when `room` are left beside the prompt."""

    def sampling(self, room: int) -> Sampling:
        return Sampling(
            max_tokens=self.new_tokens(room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            logprobs=self.top_logprobs_wanted(),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(_Request):
    """POST /v1/completions. prompt: a text, or the ids of one prompt."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def new_tokens(self, room: int) -> int:
        return self.max_tokens or COMPLETION_TOKENS


class TextPart(BaseModel):
    model_config = Strict
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = Strict
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def new_tokens(self, room: int) -> int:
        return self.max_completion_tokens or self.max_tokens or room


# Known parameters that this engine does not have. A value that asks for nothing passes.
_Neutral = Callable[[Any], bool]


def _is(*values: Any) -> _Neutral:
    return lambda value: any(type(value) is type(v) and value == v for v in values)


NEUTRAL: dict[str, _Neutral] = {
    "n": _is(1),
    "best_of": _is(1),
    "echo": _is(False),
    "suffix": _is(""),
    "logit_bias": _is({}),
    "presence_penalty": _is(0, 0.0),
    "frequency_penalty": _is(0, 0.0),
    "repetition_penalty": _is(1, 1.0),
    "min_p": _is(0, 0.0),
    "tools": _is([]),
    "tool_choice": _is("none"),
    "functions": _is([]),
    "function_call": _is("none"),
    "parallel_tool_calls": _is(),
    "response_format": _is({"type": "text"}),
    "modalities": _is(["text"]),
    "speculative_config": _is(),
    "num_speculative_tokens": _is(0),
    "use_beam_search": _is(False),
    "store": _is(False),
}

_R = TypeVar("_R", bound=_Request)


def parse(model: type[_R], body: Any) -> _R:
    """The request, or an ApiError 400 that names what is wrong with it."""
    if not isinstance(body, dict):
        raise refused("the body is no JSON object", None, "invalid_body")
    wanted = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in wanted if name in NEUTRAL]:
        value = wanted.pop(name)
        if not NEUTRAL[name](value):
            raise refused(f"`{name}` is not supported by this engine", name)
    try:
        request = model.model_validate(wanted)
    except ValidationError as error:
        raise _complaint(error) from None
    return _checked(request)


def _checked(request: _R) -> _R:
    if request.stream_options is not None and not request.stream:
        raise refused("`stream_options` needs `stream`", "stream_options", "invalid_value")
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise refused("`top_logprobs` needs `logprobs`", "top_logprobs", "invalid_value")
        both = (request.max_tokens, request.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refused(
                "`max_tokens` and `max_completion_tokens` differ", "max_tokens", "invalid_value"
            )
    return request


def _complaint(error: ValidationError) -> ApiError:
    """The first complaint; unknown names first: they often explain the rest."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    first = (unknown or found)[0]
    # The place, without the names of union members that pydantic puts into it.
    place = [
        str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()
    ]
    param = ".".join(place[:1] if not unknown else place) or None
    if unknown:
        return refused(f"`{param}` is no parameter of this engine", param, "unknown_parameter")
    if first["type"] == "missing":
        return refused(f"`{'.'.join(place)}` is missing", param, "missing_parameter")
    return refused(f"`{'.'.join(place)}`: {first['msg']}", param, "invalid_value")
