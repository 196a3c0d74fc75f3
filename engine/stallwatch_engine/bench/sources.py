"""Where prompts come from: files, chance, ShareGPT-like JSON. Equal seeds give equal prompts in equal order."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stallwatch_engine.bench.errors import PlanRefused
from stallwatch_engine.bench.prompt import MAX_TOKENS, Message, Prompt

MAX_FILE = 1 << 30  # bytes: a file is read whole
MAX_TURNS = 4096
CHARS_PER_TOKEN = 4  # of English text, when no tokenizer is there to say
_WORDS = (  # noqa: SIM905 - a list of a hundred strings reads worse
    "the of and to in is was for that it with as his on be at by this had not are but from or "
    "have an they which one you were her all she there would their we him been has when who will "
    "more no if out so said what up its about into than them can only other new some could time "
    "these two may then do first any my now such like our over man me even most made after also "
    "did many before must through back years where much your way well down should because each"
).split()


def from_random(
    count: int, *, words: int, max_tokens: int, seed: int, vocab: int | None = None
) -> list[Prompt]:
    """Prompts of `words` common words; with `vocab`, of exactly so many token ids under it."""
    if words < 1 or (vocab is not None and vocab < 1):
        raise PlanRefused("random prompts", "their length and vocabulary start at 1")
    draw = random.Random(f"prompts-{seed}")
    if vocab is not None:
        return [
            Prompt(tuple(draw.randrange(vocab) for _ in range(words)), max_tokens)
            for _ in range(count)
        ]
    return [Prompt(" ".join(draw.choices(_WORDS, k=words)), max_tokens) for _ in range(count)]


def from_file(path: Path, *, max_tokens: int) -> list[Prompt]:
    """`.jsonl`: an object a line; anything else: a prompt a line, blank lines left out.

    Fields of an object: `prompt` (text or token ids) or `messages`; `max_tokens`; `expect`; `at`.
    """
    text = _read(path)
    if path.suffix != ".jsonl":
        return [Prompt(line, max_tokens) for line in text.splitlines() if line.strip()]
    return list(_objects(path, text, max_tokens))


def from_sharegpt(path: Path, *, max_tokens: int | None) -> list[Prompt]:
    """First question of each conversation. Without max_tokens, as many as its answer is long, at four characters each.

    A list of `{"conversations": [{"from", "value"}, ...]}`, or of `{"messages": [{"role", "content"}, ...]}`.
    Conversations without a question and an answer are left out.
    """
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise PlanRefused(str(path), f"no JSON: {error}") from None
    if not isinstance(value, list):
        raise PlanRefused(str(path), "no list of conversations")
    return [prompt for each in value if (prompt := _conversation(each, max_tokens))]


def choose(
    prompts: Sequence[Prompt], count: int | None, *, seed: int, shuffle: bool
) -> list[Prompt]:
    """`count` of them, again from the front when there are fewer; all of them for None."""
    if not prompts:
        raise PlanRefused("prompts", "there are none")
    found = list(prompts)
    if shuffle:
        random.Random(f"order-{seed}").shuffle(found)
    wanted = len(found) if count is None else count
    return [found[index % len(found)] for index in range(wanted)]


def _read(path: Path) -> str:
    try:
        size = os.stat(path).st_size
        if size > MAX_FILE:
            raise PlanRefused(str(path), f"{size} bytes; at most {MAX_FILE} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanRefused(str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise PlanRefused(str(path), f"no UTF-8 at byte {error.start}") from None


def _objects(path: Path, text: str, max_tokens: int) -> Iterator[Prompt]:
    # Not splitlines(): it also cuts at separators that JSON strings may hold as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            yield _prompt(value, max_tokens)
        except (ValueError, RecursionError, TypeError, LookupError, OverflowError) as error:
            said = f"no field {error}" if isinstance(error, LookupError) else str(error)
            raise PlanRefused(f"{path}:{number}", said) from None


def _prompt(value: Any, max_tokens: int) -> Prompt:
    if not isinstance(value, dict):
        raise TypeError("no JSON object")
    content: Any = value["prompt"] if "messages" not in value else _messages(value["messages"])
    if isinstance(content, list):
        if not all(isinstance(part, int) and not isinstance(part, bool) for part in content):
            raise TypeError("`prompt` is a list of other things than token ids")
        content = tuple(content)
    if not isinstance(content, str | tuple):
        raise TypeError("`prompt` is no text")
    expect, at, most = value.get("expect"), value.get("at"), value.get("max_tokens", max_tokens)
    if not isinstance(expect, str | None) or not _number(most) or not (at is None or _number(at)):
        raise TypeError("`expect` is a text, `max_tokens` and `at` are numbers")
    return Prompt(content, int(most), expect, None if at is None else float(at))


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value or len(value) > MAX_TURNS:
        raise TypeError("`messages` is no list of turns")
    found = [Message(turn["role"], turn["content"]) for turn in value]
    if not all(isinstance(part, str) for turn in found for part in (turn.role, turn.content)):
        raise TypeError("`role` and `content` of a message are texts")
    return tuple(found)


def _conversation(value: Any, max_tokens: int | None) -> Prompt | None:
    turns = value.get("conversations", value.get("messages")) if isinstance(value, dict) else None
    if not isinstance(turns, list):
        return None
    said = [_turn(turn) for turn in turns[:MAX_TURNS]]
    for (who, question), (other, answer) in itertools.pairwise(said):
        if who in ("human", "user") and other in ("gpt", "assistant") and question and answer:
            guess = min(max(1, -(-len(answer) // CHARS_PER_TOKEN)), MAX_TOKENS)
            return Prompt(question, guess if max_tokens is None else max_tokens)
    return None


def _turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        return "", ""
    who, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    return (who, said) if isinstance(who, str) and isinstance(said, str) else ("", "")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
