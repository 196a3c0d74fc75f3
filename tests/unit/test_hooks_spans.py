"""The switch for spans: what it needs, and what is said where that is missing."""

from __future__ import annotations

import importlib.util

import pytest

from stallwatch.config.load import load
from stallwatch.errors import ConfigError
from stallwatch.hooks.spans import SpanHook

ENGINE = "[engines.chat]\ncommand = ['true']\n"


def test_spans_alone_are_enough_of_a_table(tmp_path):
    """`spans = true` needs no command; `spans = false` alone would tell nobody."""
    path = tmp_path / "c.toml"
    path.write_text(f"[hooks]\nspans = true\n{ENGINE}")
    assert load(path).hooks.spans
    path.write_text(f"[hooks]\nspans = false\n{ENGINE}")
    with pytest.raises(ConfigError, match="nobody would be told"):
        load(path)


def test_a_missing_sdk_is_an_error_with_its_mend(monkeypatch):
    """Without the extra the daemon refuses to start and says what to install."""
    real = importlib.import_module

    def without(name: str):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ImportError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr("stallwatch.hooks.spans.import_module", without)
    with pytest.raises(ConfigError, match="SDK") as caught:
        SpanHook()
    assert "stallwatch[otel]" in caught.value.hint
