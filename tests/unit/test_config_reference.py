"""docs/configuration.md holds every key of the model, and goes stale when the model changes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from stallwatch.config.base import RELOADABLE, Duration, Limit, reloadable
from stallwatch.config.load import TABLES
from stallwatch.config.model import EngineConfig
from stallwatch.watch import limits
from stallwatch.watch.policy import DEFAULT_PHASE_LIMITS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text()


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script's module, which is in no package."""
    path = ROOT / "scripts" / "config_reference.py"
    spec = importlib.util.spec_from_file_location("config_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_tables_are_the_generated_ones(reference):
    """What stands in the page is what the model says now."""
    assert reference.fill(PAGE) == PAGE


@pytest.mark.parametrize("name", TABLES)
def test_every_key_stands_in_its_table(reference, name):
    """No key of the model is missing from its table, and none has an empty meaning."""
    made = dict(reference.tables())[name]
    for key in TABLES[name].model_fields:
        assert any(line.startswith(f"| `{key}` |") for line in made.splitlines()), key
    assert not [line for line in made.splitlines() if line.endswith("|  |")]


def test_every_limit_with_a_default_has_a_meaning():
    """The keys of [engines.NAME.limits] are those that the policy knows, each with its meaning."""
    assert set(limits.MEANINGS) == set(limits.FIELDS) | set(DEFAULT_PHASE_LIMITS)


def test_what_sighup_takes():
    """A reload takes limits, restart policy and enforcement, and the page's column says the same."""
    assert reloadable(EngineConfig) == {"limits", "restart", "enforce"}
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    said = {row[0][3:-1] for row in rows if len(row) > 4 and row[3] == "yes"}
    assert said == {"limits", "restart", "enforce"}


def test_types_defaults_and_bounds(reference):
    """Every form of a key is told as the file has it."""

    class Table(BaseModel):
        must: tuple[str, ...] = Field(description="a")
        count: int | None = Field(None, ge=1, le=9, description="b")
        wait: Limit = Field(90.0, description="c")
        waits: tuple[Duration, ...] = Field((0.0, 0.25), description="d | e")
        word: Literal["x", "y"] = Field("x", description="f")
        each: dict[str, Limit] = Field(default_factory=dict, description="g")

    old = dict(reference.TABLES)
    reference.TABLES["a table"] = Table
    try:
        rows = reference._table("a table", Table).splitlines()[4:]
    finally:
        reference.TABLES.clear()
        reference.TABLES.update(old)
    assert rows == [
        "| `must` | list of strings | required | a |",
        "| `count` | integer from 1 to 9 | none | b |",
        '| `wait` | duration above 0 | `"1m30s"` | c |',
        '| `waits` | list of durations | `["0s", "250ms"]` | d \\| e |',
        '| `word` | `"x"` or `"y"` | `"x"` | f |',
        "| `each` | table of durations above 0 | none | g |",
    ]
    assert RELOADABLE not in Table.model_fields["must"].metadata


def test_a_key_without_a_description_is_an_error(reference):
    """A new key must be described before the page can be made."""

    class Table(BaseModel):
        bare: int = 1

    old = dict(reference.TABLES)
    reference.TABLES["a table"] = Table
    try:
        with pytest.raises(LookupError, match="bare has no description"):
            reference._table("a table", Table)
    finally:
        reference.TABLES.clear()
        reference.TABLES.update(old)


def test_a_table_without_a_place_is_an_error(reference):
    """A page that lost a table is refused by the table's name."""
    page = PAGE.replace("<!-- generated: hooks -->", "")
    with pytest.raises(LookupError, match="hooks"):
        reference.fill(page)


@pytest.mark.slow
def test_the_check_fails_on_a_stale_page(tmp_path):
    """`make_docs.py --check` names configuration.md when one default in it is not the model's."""
    for name in ("scripts", "docs", "supervisor"):
        (tmp_path / name).mkdir()
    for copied in ("scripts/make_docs.py", "scripts/config_reference.py", "docs/kinds.md"):
        (tmp_path / copied).write_text((ROOT / copied).read_text())
    stale = PAGE.replace('| `"100ms"` |', '| `"200ms"` |')
    assert stale != PAGE
    (tmp_path / "docs" / "configuration.md").write_text(stale)
    script = tmp_path / "scripts" / "make_docs.py"
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'supervisor')!r}); sys.argv = ['x', '--check']\n"
    code += f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "docs/configuration.md is stale" in done.stderr
