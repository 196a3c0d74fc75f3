"""Tokenizer and chat template of a checkpoint, read straight from its files: no torch is imported."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

MAX_FILE = 64 << 20
MAX_RENDERED = 8 << 20  # characters; a template may loop


class BadTokenizer(Exception):
    """The checkpoint's files are to be repaired: the message names the file and what is wrong."""


class BadChat(ValueError):
    """The template refused these messages, or the checkpoint has none: the client's to change."""


class TextCodec:
    """Text to token ids and back."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, specials: dict[str, str]
    ) -> None:
        self.tokenizer = tokenizer
        self._specials = specials
        self._template = None
        if template is not None:
            self._template = _environment().from_string(template)

    @classmethod
    def load(cls, folder: str) -> TextCodec:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja. BadTokenizer."""
        path = os.path.join(folder, "tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(_read(path))
        except BadTokenizer:
            raise
        except Exception as error:  # the library raises plain Exception
            raise BadTokenizer(f"{path}: {error}") from error
        config = _config(folder)
        template = config.get("chat_template")
        own = os.path.join(folder, "chat_template.jinja")
        if os.path.exists(own):
            template = _read(own)
        if template is not None and not isinstance(template, str):
            raise BadTokenizer(f"{folder}: chat_template is no text: give one template")
        try:
            return cls(tokenizer, template, _specials(config))
        except TemplateError as error:
            raise BadTokenizer(f"{folder}: chat template: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. special: with the tokens a post-processor adds, such as BOS."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt of a conversation, up to where the answer begins. BadChat."""
        if self._template is None:
            raise BadChat("this model has no chat template: use /v1/completions")
        try:
            stream = self._template.generate(
                messages=list(messages), add_generation_prompt=True, **self._specials
            )
            parts, size = [], 0
            for part in stream:
                size += len(part)
                if size > MAX_RENDERED:
                    raise BadChat(f"the chat template wrote over {MAX_RENDERED} characters")
                parts.append(part)
        except BadChat:
            raise
        except Exception as error:  # a template is a program of the checkpoint's: anything
            raise BadChat(f"the chat template refused these messages: {error}") from error
        return "".join(parts)

    def token_text(self, token: int) -> str:
        """One token alone; half a character shows as U+FFFD."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    env.filters["tojson"] = tojson
    return env


def _config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "tokenizer_config.json")
    if not os.path.exists(path):
        return {}
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise BadTokenizer(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise BadTokenizer(f"{path}: no JSON object")
    return config


def _specials(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, for the template; each is a text or an object with `content`."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _read(path: str) -> str:
    try:
        if os.path.getsize(path) > MAX_FILE:
            raise BadTokenizer(f"{path}: over {MAX_FILE >> 20} MiB")
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeError) as error:
        raise BadTokenizer(f"{path}: {error}") from error
