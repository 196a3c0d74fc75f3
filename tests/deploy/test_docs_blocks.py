"""Every shell block of README.md and docs/ is run as it is printed, or says why it is not."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import place
from deploy_helpers import tool
from docs_blocks import BadBlock, Block, Plan, blocks, pages, plan
from docs_reader import ROOT, Reader
from stallwatch.config.load import build

PAGES = pages(ROOT)
# Pages whose reader is told to look at a stall that is there.
HANGS = frozenset({"README.md"})
ENGINE = {
    "chat": {"command": ["vllm"], "port": 8001},
    "a": {"command": ["x"]},
    "b": {"command": ["x"]},
}


def plans(name: str) -> list[Plan]:
    found = (plan(block) for block in blocks(name, PAGES[name]))
    return [each for each in found if each is not None]


def runs(name: str) -> bool:
    try:
        return any(each.commands for each in plans(name))
    except BadBlock:
        return False  # the test of markers says it


@pytest.mark.parametrize("name", PAGES)
def test_every_marker_is_known_and_has_a_reason(name: str) -> None:
    """No shell block is without a language, and none is left out without saying why."""
    plans(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [name for name in PAGES if runs(name)])
def test_the_blocks_of_a_page_run_in_their_order(name: str, folder: Path) -> None:
    """What a page tells its reader to type works, from its first block to its last."""
    found = [each for each in plans(name) if each.commands]
    if any(command.startswith("curl ") for each in found for command in each.commands):
        tool("curl", "apt install curl")
    with Reader(folder, hang=name in HANGS) as reader:
        for each in found:
            reader.run(each)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        pytest.param(name, block, id=block.place)
        for name, text in PAGES.items()
        for block in blocks(name, text)
        if block.language == "toml"
    ],
)
def test_every_piece_of_configuration_is_accepted(name: str, block: Block) -> None:
    """A TOML block is a configuration, with an engine added where it shows another table."""
    table = tomllib.loads("\n".join(block.lines))
    table.setdefault("engines", {"chat": ENGINE["chat"]})
    build(table, source=name)


SHELL = "```sh\nstallwatch status\n```\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```\nstallwatch status\n```\n", "needs its language"),
        ("```\n$ make\n```\n", "needs its language"),
        (f"<!-- not run: -->\n{SHELL}", "no reason"),
        (f"<!-- not run: no -->\n{SHELL}", "no reason"),
        (f'<!-- not run "stallwatch": -->\n{SHELL}', "no reason"),
        (f'<!-- not run "other": it is not there -->\n{SHELL}', "no command begins"),
        (f"<!-- not run -->\n{SHELL}", "no marker that is known"),
        (f"<!-- run beside a horse -->\n{SHELL}", "no marker that is known"),
        (f"<!-- Not run: needs a cluster -->\n{SHELL}", "no marker that is known"),
        ("<!-- not run: needs a cluster -->\n```toml\na = 1\n```\n", "no shell block"),
        ("```console\nstallwatch status\n```\n", "no command in it"),
        ("```sh\nstallwatch status\n", "does not end"),
        ("```sh\nstallwatch \\\n```\n", "goes on"),
        (f'<!-- not run: needs a cluster -->\n<!-- run until "x" -->\n{SHELL}', "says how"),
    ],
)
def test_a_block_that_nobody_can_judge_is_refused(text: str, words: str) -> None:
    """A shell block in disguise, a marker without a reason, a marker that is none."""
    with pytest.raises(BadBlock, match=words):
        [plan(block) for block in blocks("page.md", text)]


def test_what_is_run_of_a_block() -> None:
    """Prompts, output, comments and continuation lines are told apart; a prefix leaves lines out."""
    text = """Words.

<!-- not run "pip install": CI installs it itself -->

<!-- run until "up" -->
```console
$ pip install x
ok
$ stallwatch status  # now
# no command
$ stallwatch serve \\
  -c FILE
```

```text
stallwatch is a name
```

<!-- generated: x -->
```sh
# a remark
a; b
```
"""
    found = [plan(block) for block in blocks("page.md", text)]
    assert found[1] is None
    assert found[0] is not None
    assert found[0].commands == ("stallwatch status  # now", "stallwatch serve   -c FILE")
    assert (found[0].until, found[0].beside) == ("up", "")
    assert found[2] is not None
    assert found[2].commands == ("a; b",)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("command", ["false", "stallwatch no-such-command", "false | true"])
def test_a_command_that_fails_fails_the_page(folder: Path, command: str) -> None:
    """The reader of a page that is wrong says so, with the place and what was printed."""
    block = Block("page.md", 7, "sh", (command,))
    with Reader(folder, hang=False) as reader, pytest.raises(AssertionError, match=r"page\.md:7"):
        reader.run(Plan(block, (command,)))
