"""Secrets out of command lines, environments and logs; request ids as hashes; no prompt text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import quote

_T = TypeVar("_T")

MASK = "***"
MAX_LINE = 8192
MIN_KNOWN = 8  # a shorter value would be found in ordinary text
MAX_KNOWN = 256

# The last word of a name decides: api_key, HF_TOKEN and client-secret are secrets, max_tokens,
# tokenizer and bos_token_id are not. Tokens of a vocabulary are named by the word before.
_PREFIX = r"(?:[A-Za-z0-9]+[-_.]+)*"
_VOCABULARY = (
    rf"(?!{_PREFIX}(?:bos|eos|pad|unk|sep|cls|mask|stop|special|image|audio|video|next|per|num"
    r"|added|prompt|first|last|output)[-_.]token(?![A-Za-z0-9_.-]))"
)
_NAME = (
    rf"{_PREFIX}(?:token|pwd|passphrase|credentials?|cookie|[A-Za-z0-9]*(?:secret|password|passwd|apikey)"
    r"|(?:access|auth|refresh|id|bearer|hf|session)token"
    r"|(?:api|access|secret|private|auth|encryption|signing|master|account|subscription|license)"
    r"[-_. ]?key)"
)
# In capitals (an environment variable) every ..._KEY is one.
_CORE = rf"(?:{_VOCABULARY}(?i:{_NAME})|(?:[A-Z0-9]+_+)*KEY)(?![A-Za-z0-9_.-])"
_WORD = rf"(?<![A-Za-z0-9_.-])[-_.]{{0,4}}{_CORE}"
_DOUBLE = r'"(?:\\.|[^"\\])*(?:"|$)'
_SINGLE = r"'(?:\\.|[^'\\])*(?:'|$)"
_VALUE = rf"(?:{_DOUBLE}|{_SINGLE}|\[[^\]]*(?:\]|$)|\S+)"

_ASSIGN = re.compile(
    rf"""({_WORD}\\{{0,3}}["']?\s{{0,4}}(?::=|=>|[=:])\s{{0,4}}\\{{0,3}})({_VALUE})"""
)
_FLAG = re.compile(rf"((?<![^\s\"'=])--?{_CORE}\s{{1,4}})({_VALUE})")
# A command as Python or JSON prints it, ['--api-key', 'X'], and a header as ASGI does, (b'x-api-key',
# b'X').
_REPR = re.compile(rf"""((?:["']--?|\(b?["']){_CORE}["'],\s{{0,4}}b?)({_VALUE})""")
# Said without a sign between: X-Api-Key 'X', "API key is X".
_KEYED = (
    r"(?:api|access|secret|private|auth|encryption|signing|master|account|subscription|license)"
    r"[ _.-]?(?:key|token)"
)
# Of words only what looks made by a machine: "API key is invalid" and "token is 128009" stay.
_MADE = (
    r"""(?=["'`]\S|[^\s\d]*\d|[^\s]*[a-z][^\s]*[A-Z]|\S{16})(?!\d+[.,;:)]*(?:\s|$))"""
    rf"""(?:{_DOUBLE}|{_SINGLE}|\S{{6,}})"""
)
_SAYS = r"(?:(?:was |is )?set to|is|was|equals)"
_SAID = re.compile(
    rf"""(?i)((?<![A-Za-z0-9])(?:{_KEYED}["'`]?\s{{1,4}}(?:{_SAYS}\s{{1,4}})?"""
    rf"""|(?:password|passwd|passphrase|secret|token)["'`]?\s{{1,4}}{_SAYS}\s{{1,4}}))(?-i:{_MADE})"""
)
_SCHEME = re.compile(r"(?i)\b(bearer\s{1,4})[^\s\"',;]+")
# A header's value goes to the end of its quotes, or of the line: cookies and digests hold quotes.
_HEADER = re.compile(
    r"""(?i)((["'])?(?<![A-Za-z0-9_])(?:(?:proxy-)?authorization|(?:set-)?cookie2?)"""
    r"""(?:["']?\s{0,4}[:=]|["'],)\s{0,4}b?)"""
    rf"""(?(2)(?:{_DOUBLE}|{_SINGLE}|(?:(?!\2)[^\r\n])*)|[^\r\n]+)"""
)
_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/?#\"'<>]*@")
# curl -u user:pass, --auth user:pass; -u 1000:1000 is a user of the system.
_NEXT = r"""(?:["'],\s{0,4}["']|(?:\s{1,4}|=)["']?)"""
_LOGIN = re.compile(
    rf"""((?<![^\s"'=])(?:-u|--(?:[a-z]{{1,20}}-){{0,3}}(?:auth|user|login)){_NEXT})"""
    r"""(?!\d+:\d+(?![^\s"'])|[a-z]+://)([^\s"':]{1,80}:[^\s"']+)"""
)
# -k SECRET; "curl -k https://..." and "pytest -k name" have another -k.
_SHORT = re.compile(
    rf"""((?<![^\s"'=])-k{_NEXT})(?!-|[a-z]{{2,8}}:/|[./~]|\d+(?![^\s"']))([^\s"']{{6,}})"""
)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{12,}|xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|nvapi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
# What a terminal does not show must not split a name from its value: escapes, controls but tab and
# line ends, characters without width.
_UNSEEN = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]|\x1b[]PX^_][^\x07\x1b\r\n]*+(?:\x07|\x1b\\)"
    r"|\x1b[ -/]*+[0-Z\\^-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u2064\ufeff]"
)
_PEM = r"-----%s [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_BEGIN, _END = re.compile(_PEM % "BEGIN"), re.compile(_PEM % "END")
_BLOCK = re.compile(rf"(?s)({_BEGIN.pattern}).+?(?={_END.pattern}|$)")
_BODY = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}|(?<!\S)[A-Za-z0-9+/]+={0,2}$")
# Any line of a key whose beginning is out of sight: PEM writes 64 or 76 a line; hashes are hex.
_WIDE = re.compile(r"(?<!\S)(?![0-9a-fA-F]+$)(?:[A-Za-z0-9+/]{64}|[A-Za-z0-9+/]{76})\s*$")
_MAX_BLOCK = 200  # lines
# vLLM with --enable-log-requests writes the prompt; clients' bodies appear in error logs.
_PROMPT = re.compile(
    rf"""(\b(?:prompt|content|messages|prompt_token_ids|input)["']?\s{{0,4}}[:=]\s{{0,4}})"""
    rf"""(?:{_DOUBLE}|{_SINGLE}|\[.*(?:\]|$))"""
)
_REQUEST = re.compile(r"\b(?:chat)?cmpl-[0-9A-Za-z][0-9A-Za-z-]{7,80}")
_FLAG_ITEM = re.compile(rf"--?{_CORE}$")
_STRINGS = re.compile(rf"{_DOUBLE}|{_SINGLE}")
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/(?![A-Za-z0-9]{24})[\w.@-]*)+$")
_STEMS = ("key", "token", "pwd", "pass", "secret", "cred", "cookie", "auth")


def redact(text: str) -> str:
    """The text without what no one sees, and with every secret's value replaced by ***.

    Text beyond MAX_LINE characters is cut: a secret could straddle any window.
    """
    return _shown_only(_seen(text)[:MAX_LINE])


def _seen(text: str) -> str:
    return text if text.isprintable() else _UNSEEN.sub("", text)


def _shown_only(text: str) -> str:
    if "://" in text:
        text = _URL.sub(rf"\g<1>{MASK}@", text)
    low = text.casefold()
    if any(stem in low for stem in _STEMS):  # most lines hold none, and cost nothing more
        if "PRIVATE KEY" in text:
            text = _BLOCK.sub(rf"\g<1>{MASK}", text)
        if "auth" in low or "cookie" in low:
            text = _HEADER.sub(rf"\g<1>{MASK}", text)
        for pattern in (_ASSIGN, _FLAG, _REPR, _SAID):
            text = pattern.sub(rf"\g<1>{MASK}", text)
    if "bearer" in low:
        text = _SCHEME.sub(rf"\g<1>{MASK}", text)
    if "-u" in text or "--" in text:
        text = _LOGIN.sub(rf"\g<1>{MASK}", text)
    if "-k" in text:
        text = _SHORT.sub(rf"\g<1>{MASK}", text)
    return _SHAPES.sub(MASK, text)


def redact_log(line: str, *, salt: str = "") -> str:
    """A log line: secrets and prompts out, request ids hashed as in the report."""
    return _log(redact(line), salt)


def _log(line: str, salt: str) -> str:
    hidden = _PROMPT.sub(rf"\g<1>{MASK}", line)
    return _REQUEST.sub(lambda found: hash_request_id(found[0], salt=salt), hidden)


def redact_lines(lines: Iterable[str], *, salt: str = "") -> list[str]:
    """A log's tail: each line as by redact_log, and private keys that run over several lines."""
    return _NOTHING_KNOWN.redact_lines(lines, salt=salt)


def _without_keys(lines: list[str]) -> list[str]:
    """The bodies of PEM blocks out, whole ones and those of which the tail holds only a part."""
    out = [_WIDE.sub(MASK, line) for line in lines]
    left = 0
    for i, line in enumerate(out):
        if _END.search(line):
            if not left:  # its beginning is out of sight: go back over what looks like a body
                for j in range(i - 1, -1, -1):
                    least = 1 if j == i - 1 else 40  # only the last line of a body is short
                    word = (out[j].split() or [""])[-1]
                    if word != MASK and not (len(word) >= least and _BODY.fullmatch(word)):
                        break
                    out[j] = _BODY.sub(MASK, out[j])
            left = 0
        elif _BEGIN.search(line):
            left = _MAX_BLOCK
        elif left:
            left -= 1
            out[i] = _BODY.sub(MASK, line)
    return out


def redact_argv(argv: Iterable[str]) -> tuple[str, ...]:
    """A command, item by item. `--api-key A B` takes several values: all go, up to the next flag."""
    out: list[str] = []
    before = ""
    for item, hidden in _items(argv):
        pair = f"{before} {item}"
        login = before.startswith("-") and any(p.match(pair) for p in (_LOGIN, _SHORT))
        out.append(MASK if hidden or login else item if _FLAG_ITEM.match(item) else redact(item))
        before = item
    return tuple(out)


def _items(argv: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Each item, and whether it is the value of a secret's flag."""
    first = hidden = False
    for item in argv:
        if hidden and (first or not item.startswith("-")) and not item.startswith("--"):
            yield item, True
            first = False
            continue
        first = hidden = _FLAG_ITEM.match(item) is not None
        yield item, False


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    """An environment: by name first, then by the look of the value."""
    return {k: MASK if re.fullmatch(_WORD, k) else redact(v) for k, v in env.items()}


def hash_request_id(request_id: str, *, salt: str = "") -> str:
    """A stable name for a request that says nothing about it: 'req-' and 12 hex digits."""
    digest = hashlib.sha256(f"{salt}\0{request_id}".encode("utf-8", "surrogatepass"))
    return f"req-{digest.hexdigest()[:12]}"


def known_secrets(command: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Values that a command and an environment give to secret-looking names."""
    found = [value for name, value in env.items() if re.fullmatch(_WORD, name)]
    for value in env.values():
        found += re.findall(r"://[^\s/?#\"'<>:@]*:([^\s/?#\"'<>@]+)@", value)
    argv = list(command)
    found += [item for item, hidden in _items(argv) if hidden]
    for item, before in zip(argv, ["", *argv], strict=False):
        for pattern in (_ASSIGN, _FLAG, _REPR):
            found += [match[2] for match in pattern.finditer(item)]
        for pattern in (_LOGIN, _SHORT):
            if before.startswith("-") and (match := pattern.match(f"{before} {item}")):
                found.append(match[2].partition(":")[2] or match[2])
    for value in tuple(found):
        found += [each[1:-1] for each in _STRINGS.findall(value)]
    return found


def _telling(value: str) -> bool:
    """Whether a value may be searched for: not short, no path, no number, no word like 'disabled'."""
    if len(value) < MIN_KNOWN or value.startswith("-----") or _PATH.match(value):
        return False
    try:
        float(value)
    except ValueError:
        return value.casefold() not in ("disabled", "required", "optional", "undefined")
    return False


class Redactor:
    """The functions of this module, for one engine: values known to be secret go wherever they are.

    Immutable, safe from any thread.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        values: dict[str, None] = {}
        for value in known:
            parts = [value, *value.splitlines(), *value.split(",")]
            for part in filter(_telling, (part.strip().strip("\"'") for part in parts)):
                # as it is, in a URL, in JSON
                values |= dict.fromkeys((part, quote(part, safe=""), json.dumps(part)[1:-1]))
        longest = sorted(values, key=len, reverse=True)[:MAX_KNOWN]
        self._known = tuple(_seen(value) for value in longest)

    @classmethod
    def of(cls, command: Iterable[str], env: Mapping[str, str]) -> Redactor:
        """For an engine that was started with this command and this environment."""
        return cls(known_secrets(command, env))

    def redact(self, text: str) -> str:
        """As the function redact."""
        return _shown_only(self._unknown(text)[:MAX_LINE])

    def redact_log(self, line: str, *, salt: str = "") -> str:
        """As the function redact_log."""
        return _log(self.redact(line), salt)

    def redact_lines(self, lines: Iterable[str], *, salt: str = "") -> list[str]:
        """As the function redact_lines."""
        return _without_keys([self.redact_log(line, salt=salt) for line in lines])

    def redact_argv(self, argv: Iterable[str]) -> tuple[str, ...]:
        """As the function redact_argv."""
        return tuple(map(self._unknown, redact_argv(argv)))

    def redact_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """As the function redact_env."""
        return {name: self._unknown(value) for name, value in redact_env(env).items()}

    def redact_all(self, value: _T) -> _T:
        """Every string of a JSON-like value, keys too."""
        return cast("_T", self._all(value, {}))

    def _all(self, value: Any, done: dict[str, str]) -> Any:
        if isinstance(value, str):
            if value not in done:  # frames and addresses repeat
                done[value] = self.redact(value)
            return done[value]
        if isinstance(value, Mapping):
            return {self._all(k, done): self._all(v, done) for k, v in value.items()}
        if isinstance(value, list):
            return [self._all(v, done) for v in value]
        return tuple(self._all(v, done) for v in value) if isinstance(value, tuple) else value

    def _unknown(self, text: str) -> str:
        """The text without known values, nor the part of one that a cut left at either end."""
        text = _seen(text)
        for value in self._known:  # one after the other: five times as fast as one pattern for all
            if value in text:
                text = text.replace(value, MASK)
        for value in self._known:
            size = len(value)
            at = text.rfind(value[:MIN_KNOWN], max(0, len(text) - size))
            if at >= 0 and value.startswith(text[at:].rstrip("…")):
                text = text[:at] + MASK
            at = text.find(value[-MIN_KNOWN:], 0, size)
            if at >= 0 and value.endswith(text[: at + MIN_KNOWN]):
                text = MASK + text[at + MIN_KNOWN :]
        return text


_NOTHING_KNOWN = Redactor()
