from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from daemon_helpers import toml
from stallwatch.cli.config import in_force
from stallwatch.config import load
from stallwatch.config.hooks import HooksConfig
from stallwatch.config.load import build
from stallwatch.daemon.main import refuse_other_changes
from stallwatch.errors import ConfigError
from stallwatch.hooks.signing import load_secret

ENGINE = {"engines": {"chat": {"command": ["engine"]}}}
URL = "https://hooks.example/services/T0123456789abcdef"
SECRET = "a-secret-nobody-may-see-4711"


def written(folder: Path, mode: int, tables: dict[str, Any]) -> Path:
    path = folder / "stallwatch.toml"
    path.write_text(toml({**ENGINE, **tables}))
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "nobody would be told"),
        ({"command": "notify --now"}, "no shell is ever used"),
        ({"command": [""]}, "names no program"),
        ({"webhook": "ftp://host/x"}, "no URL"),
        ({"webhook": "https://"}, "no URL"),
        ({"webhook": "https://host:99999/"}, "no URL"),
        ({"webhook": "https://me:pw@host/"}, "holds a login"),
        ({"webhook": "https://host/a b"}, "a space"),
        ({"webhook": [URL]}, "no URL"),
        ({"webhook": URL, "secret_env": "not-a-name"}, "never the secret itself"),
        ({"webhook": URL, "secret_env": "A", "secret_file": "/x"}, "both set"),
        ({"command": ["x"], "secret_env": "A"}, "there is none"),
        ({"command": ["x"], "events": ["stal"]}, "stall"),
        ({"command": ["x"], "comand_deadline": "1s"}, "did you mean 'command_deadline'"),
        ({"command": ["x"], "attempts": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_without_the_url(table, words):
    """Each mistake is a sentence with exit code 78, and none repeats the path of a webhook."""
    with pytest.raises(ConfigError) as found:
        build({**ENGINE, "hooks": table}, source="x.toml")
    assert found.value.exit_code == 78
    assert words in str(found.value)
    assert "T0123456789abcdef" not in str(found.value)


def test_what_is_in_force_is_shown_without_what_it_takes_to_post(tmp_path):
    """`config show`, repr and describe name the host; path, query and secret are nowhere."""
    config = load(written(tmp_path, 0o600, {"hooks": {"webhook": f"{URL}?k=1"}}))
    shown = [json.dumps(in_force(config)), json.dumps(config.describe()), repr(config)]
    assert "https://hooks.example/***" in shown[0]
    for text in shown:
        assert "T0123456789abcdef" not in text
        assert "k=1" not in text
    assert config.hooks is not None
    assert config.hooks.webhook == f"{URL}?k=1"


@pytest.mark.parametrize(
    "tables",
    [
        {"hooks": {"webhook": URL}},
        {"hooks": {"webhook": "https://host/?key=abc"}},
        {"hooks": {"command": ["notify", "--api-key", "abcdefgh12"]}},
        {"engines": {"chat": {"command": ["engine"], "env": {"HF_TOKEN": "hf_abcdefgh"}}}},
        {"engines": {"chat": {"command": ["engine", "--api-key", "abcdefgh12"]}}},
    ],
)
@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620])
def test_a_loose_file_that_holds_a_secret_is_refused(tmp_path, tables, mode):
    """Group or others at it: exit 78, the key named, the value not; with 0600 it is good."""
    path = written(tmp_path, mode, tables)
    with pytest.raises(ConfigError, match="holds a secret") as found:
        load(path)
    assert found.value.exit_code == 78
    assert "chmod 600" in str(found.value)
    assert "abc" not in str(found.value)
    path.chmod(0o600)
    assert load(path).engines


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"hooks": {"webhook": "https://alerts.example/stallwatch", "secret_env": "HOOK_SECRET"}},
        {"hooks": {"command": ["/usr/bin/notify", "--channel", "oncall"]}},
        {"engines": {"chat": {"command": ["engine"], "env": {"KEY": "/run/key", "A_TOKEN": "1"}}}},
    ],
)
def test_a_loose_file_without_a_secret_is_good(tmp_path, tables):
    """A path to a key, a short value or the name of a variable is no secret."""
    assert load(written(tmp_path, 0o644, tables)).engines


def test_a_secret_comes_from_a_private_file(tmp_path):
    """0600 is read and trimmed; loose, missing, short, a FIFO, a folder: refused, exit 78, value unsaid."""
    path = tmp_path / "secret"
    config = HooksConfig(webhook=URL, secret_file=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_secret(config)
    path.write_text(f"{SECRET}\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as found:
        load_secret(config)
    assert SECRET not in str(found.value)
    path.chmod(0o600)
    assert load_secret(config) == SECRET.encode()
    path.write_text("short-one")
    with pytest.raises(ConfigError, match="shorter than 16") as found:
        load_secret(config)
    assert "short-one" not in str(found.value)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, words in (("fifo", "no regular file"), ("", "Is a directory")):
        with pytest.raises(ConfigError, match=words):
            load_secret(HooksConfig(webhook=URL, secret_file=tmp_path / name))


def test_a_secret_in_a_variable_is_taken_out_of_it():
    """What is started later does not inherit it; a variable that is not set is an error."""
    env = {"HOOK": SECRET, "OTHER": "1"}
    config = HooksConfig(webhook=URL, secret_env="HOOK")
    assert load_secret(config, env) == SECRET.encode()
    assert env == {"OTHER": "1"}
    with pytest.raises(ConfigError, match="no such variable"):
        load_secret(config, env)


def test_a_reload_does_not_change_hooks():
    """SIGHUP takes limits and policies; another command is refused by name."""
    old, new = (
        build({**ENGINE, "hooks": {"command": [name]}}, source="x.toml") for name in ("a", "b")
    )
    refuse_other_changes(old, old)
    with pytest.raises(ConfigError, match=r"\[hooks\] changed"):
        refuse_other_changes(old, new)
