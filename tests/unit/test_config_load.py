from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.config import from_command, load
from stallwatch.config.duration import parse_duration, parse_limit, show_duration
from stallwatch.config.load import build
from stallwatch.errors import ConfigError

OK: dict[str, Any] = {"engines": {"chat": {"command": ["engine", "{port}"], "port": 8001}}}


def chat(**keys: Any) -> dict[str, Any]:
    return {"engines": {"chat": {"command": ["engine"], **keys}}}


class TestDuration:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("60s", 60.0),
            ("250ms", 0.25),
            ("30m", 1800.0),
            ("1h30m", 5400.0),
            ("1.5s", 1.5),
            ("0s", 0),
        ],
    )
    def test_strings_with_units_are_seconds(self, text: str, expected: float) -> None:
        """A number with a unit, or several of them in a row, is that many seconds."""
        assert expected == parse_duration(text)

    @pytest.mark.parametrize(
        "value",
        [
            "60",
            60,
            1.5,
            "nan",
            "inf",
            "-5s",
            math.nan,
            math.inf,
            True,
            None,
            "",
            "5 s",
            "s",
            "5s x",
        ],
        ids=repr,
    )
    def test_everything_else_is_refused(self, value: object) -> None:
        """Bare numbers, NaN, infinity, negative values and garbage are errors, never 'no limit'."""
        with pytest.raises(ValueError, match=r"duration|unit"):
            parse_duration(value)

    def test_a_limit_is_never_zero(self) -> None:
        """Zero would mean 'at once' to one reader and 'off' to another, so it is refused."""
        with pytest.raises(ValueError, match="zero"):
            parse_limit("0s")

    @given(st.integers(min_value=1, max_value=10**7))
    def test_whole_seconds_survive_showing(self, seconds: int) -> None:
        """show_duration is the inverse of parse_duration for whole seconds."""
        assert seconds == parse_duration(show_duration(seconds))

    @given(st.text(max_size=40))
    def test_any_text_is_a_duration_or_a_value_error(self, text: str) -> None:
        """No text makes the parser raise anything but ValueError, and no result is NaN or negative."""
        try:
            found = parse_duration(text)
        except ValueError:
            return

        assert math.isfinite(found)
        assert found >= 0


class TestMistakes:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ({"engines": {"chat": {"comand": ["x"]}}}, ["[engines.chat]", "comand", "command"]),
            ({"engine": {}}, ["[engine]", "engines"]),
            (chat(limits={"default": "nan"}), ["[engines.chat.limits]", "default", "nan"]),
            (chat(limits={"default": math.nan}), ["default", "unit"]),
            (chat(limits={"default": "60"}), ["default", "60"]),
            (chat(restart={"budgt": 1}), ["[engines.chat.restart]", "budgt", "budget"]),
            (chat(enforce="kill"), ["enforce", "observe", "restart"]),
            (chat(port=0), ["port"]),
            (chat(port="8001"), ["port"]),
            ({"engines": {"a b": {"command": ["x"]}}}, ["a b", "a-z"]),
            ({"engines": {"a": {"command": "vllm serve"}}}, ["command", "list of strings"]),
            ({"engines": {"a": {"command": []}}}, ["command", "empty"]),
            ({}, ["no engine"]),
            (chat(port=8000) | {"gateway": {}}, ["gateway", "8000", "its own port"]),
            (chat(port=1) | {"gateway": {"hol": "1s"}}, ["[gateway]", "hol", "hold"]),
            (
                chat(port=1) | {"gateway": {"limits": {"first": "1s"}}},
                ["gateway.limits", "first_token"],
            ),
            (chat(port=1) | {"gateway": {"engines": ["cat"]}}, ["cat", "chat"]),
            (
                chat(port=1) | {"gateway": {"upstreams": {"chat": "unix:x"}}},
                ["upstreams", "absolute"],
            ),
            (chat(port=None) | {"gateway": {}}, ["gateway", "port"]),
            (
                {"engines": {"gateway": {"command": ["x"]}}, "gateway": {}},
                ["gateway", "another name"],
            ),
            ({**OK, "supervisor": {"control": "localhost"}}, ["control", "HOST:PORT"]),
            ({**OK, "supervisor": {"contrl": "x"}}, ["contrl", "control"]),
            (chat(ready={"http": "health"}), ["http", "health"]),
            (chat(ready={"http": "/health"}), ["ready.http", "port"]),
            ({"engines": {"a": {"command": ["x", "{port}"]}}}, ["{port}", "port"]),
        ],
    )
    def test_each_names_the_place_and_the_mend(
        self, data: dict[str, Any], words: list[str]
    ) -> None:
        """A wrong configuration is one ConfigError (exit 78) that names table, key and remedy."""
        with pytest.raises(ConfigError) as caught:
            build(data, source="stallwatch.toml")

        text = str(caught.value)
        assert text.startswith("stallwatch.toml")
        assert all(word in text for word in words), text
        assert caught.value.exit_code == 78

    def test_two_engines_on_one_port_are_named_together(self) -> None:
        """The error names both engines and the port they share."""
        data = {"engines": {n: {"command": ["x"], "port": 8001} for n in ("a", "b")}}

        with pytest.raises(ConfigError, match=r"engines.b.*engines.a.*8001"):
            build(data, source="f")

    def test_files_that_cannot_be_read_or_parsed(self, tmp_path: Path) -> None:
        """A missing file, bad TOML and bytes that are no text are ConfigErrors naming the file."""
        bad = tmp_path / "bad.toml"
        bad.write_text("[engines.chat\n")
        binary = tmp_path / "bin.toml"
        binary.write_bytes(b"\xff\xfe\x00")

        for path in (tmp_path / "none.toml", bad, binary, tmp_path):
            with pytest.raises(ConfigError, match=str(path)):
                load(path)


class TestFromCommand:
    def test_json_arguments_pass_untouched(self) -> None:
        """Arguments with braces reach the engine byte for byte."""
        command = ["vllm", "serve", "M", "--port", "9001", "--compilation-config", '{"level": 3}']

        config, remarks = from_command(command)

        assert list(config.engines["engine"].command) == command
        assert config.engines["engine"].port == 9001
        assert remarks == ()

    def test_vllm_serve_without_a_port_gets_one_and_says_so(self) -> None:
        """`vllm serve` alone would take 8000, the gateway's port; it gets 8001 and a remark."""
        config, remarks = from_command(["/opt/bin/vllm", "serve", "M"])

        assert config.engines["engine"].command[-2:] == ("--port", "8001")
        assert config.engines["engine"].port == 8001
        assert "8001" in remarks[0]

    def test_another_command_needs_engine_port_to_have_one(self) -> None:
        """Nothing is guessed for a command we do not know."""
        plain, _ = from_command(["./engine"])
        told, _ = from_command(["./engine"], engine_port=9000, observe=True)

        assert plain.engines["engine"].port is None
        assert told.engines["engine"].port == 9000
        assert told.engines["engine"].enforce == "observe"

    def test_an_empty_command_is_refused(self) -> None:
        """`serve --` with nothing after it names the missing command."""
        with pytest.raises(ConfigError, match="empty"):
            from_command([])


def test_the_design_example_is_valid(tmp_path: Path) -> None:
    """The example of the documentation loads, and its durations are seconds."""
    path = tmp_path / "stallwatch.toml"
    path.write_text(
        """
[supervisor]
control = "127.0.0.1:9470"
[engines.chat]
command = ["vllm", "serve", "MODEL", "--port", "{port}"]
port = 8001
ready = { http = "/health" }
enforce = "restart"
[engines.chat.limits]
default = "60s"
execute_model = "60s"
start = "30m"
[engines.chat.restart]
policy = "by-kind"
budget = 5
window = "30m"
"""
    )

    config = load(path)

    assert config.engines["chat"].limits == {
        "default": 60.0,
        "execute_model": 60.0,
        "start": 1800.0,
    }
    assert config.engines["chat"].restart.window == 1800.0
    assert config.describe()["engines"]["chat"]["port"] == 8001
