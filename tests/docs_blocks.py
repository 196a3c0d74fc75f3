"""Shell blocks of the documentation: found, judged, and turned into what is to be run.

A block is run as it stands unless a comment, invisible in rendered Markdown, stands above it:

    <!-- not run: REASON -->            nothing of it is run
    <!-- not run "PREFIX": REASON -->   the commands that begin so are not run, the others are
    <!-- run until "TEXT" -->           the last command serves on: TEXT must appear in what it says
    <!-- run beside a daemon -->        a daemon with an engine `chat` is there (or: a server)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELL = frozenset({"console", "sh", "bash", "shell"})
# A block without a language that begins a line with one of these is a shell block in disguise.
PROGRAMS = frozenset(
    [
        *("$", "stallwatch", "curl", "make", "pip", "python", "python3", "docker", "kubectl"),
        *("systemctl", "ssh", "sysctl", "cc", "install", "pytest", "git", "sudo", "export", "cd"),
    ]
)
_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")
_COMMENT = re.compile(r"^\s*<!--\s*(.*?)\s*-->\s*$")
_MARKER = re.compile(r"\b(not\s+)?run\b", re.IGNORECASE)
_SKIP = re.compile(r'not run(?: "([^"]+)")?:\s*(.*)')
_UNTIL = re.compile(r'run until "([^"]+)"')
_BESIDE = re.compile(r"run beside a (daemon|server)")
_WORDS = 3  # fewer are no reason


class BadBlock(ValueError):
    """The page must be mended; the message names page and line."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block and the comments right above it."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]
    comments: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run of a block."""

    block: Block
    commands: tuple[str, ...]
    until: str = ""
    beside: str = ""


def blocks(name: str, text: str) -> Iterator[Block]:
    """Every fenced block of a page."""
    comments: list[str] = []
    inside: list[str] = []
    fence, language, begin = "", "", 0
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not found[2]:
                yield Block(name, begin, language, tuple(inside), tuple(comments))
                fence, comments, inside = "", [], []
            else:
                inside.append(line)
        elif found:
            fence, language, begin = found[1], found[2], number
        elif comment := _COMMENT.match(line):
            comments.append(comment[1])
        elif line.strip():
            comments = []
    if fence:
        raise BadBlock(f"{name}:{begin}: the block does not end")


def plan(block: Block) -> Plan | None:
    """What is to be run of it; None for what is no shell block. Raises BadBlock."""
    markers = [each for each in block.comments if _MARKER.match(each)]
    if block.language not in SHELL:
        if not block.language and any(_first(line) in PROGRAMS for line in block.lines):
            raise BadBlock(f"{block.place}: a shell block needs its language: ```console or ```sh")
        if markers:
            raise BadBlock(f"{block.place}: a marker above what is no shell block")
        return None
    commands = tuple(_commands(block))
    if not commands:
        raise BadBlock(f"{block.place}: no command in it (in ```console they begin with `$ `)")
    until = beside = ""
    for marker in markers:
        if skip := _SKIP.fullmatch(marker):
            commands = _without(block, commands, skip[1], skip[2])
        elif found := _UNTIL.fullmatch(marker):
            until = found[1]
        elif found := _BESIDE.fullmatch(marker):
            beside = found[1]
        else:
            raise BadBlock(f"{block.place}: no marker that is known: {marker!r}")
    if not commands and (until or beside):
        raise BadBlock(f"{block.place}: nothing of it is run, and it says how")
    return Plan(block, commands, until, beside)


def _without(
    block: Block, commands: tuple[str, ...], prefix: str | None, reason: str
) -> tuple[str, ...]:
    if len(reason.split()) < _WORDS:
        raise BadBlock(f"{block.place}: not run, and no reason why")
    kept = tuple(each for each in commands if prefix and not each.startswith(prefix))
    if prefix and len(kept) == len(commands):
        raise BadBlock(f"{block.place}: no command begins with {prefix!r}")
    return kept


def _commands(block: Block) -> Iterator[str]:
    """Commands with their continuation lines; in a console block, what follows a prompt."""
    waiting = ""
    for line in block.lines:
        if block.language == "console" and not waiting:
            if not line.startswith("$ "):
                continue  # what a command prints
            line = line.removeprefix("$ ")  # noqa: PLW2901
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        if waiting.strip() and not waiting.lstrip().startswith("#"):
            yield waiting.strip()
        waiting = ""
    if waiting:
        raise BadBlock(f"{block.place}: the last line goes on")


def _first(line: str) -> str:
    return (line.split() or [""])[0]


def pages(root: Path) -> dict[str, str]:
    """README.md and every page of docs/, by name."""
    found = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {str(path.relative_to(root)): path.read_text() for path in found}
