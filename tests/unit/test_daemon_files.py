"""The limit on open files: raised if it can be, refused in words if it is hopeless."""

from __future__ import annotations

import resource

import pytest

from stallwatch.daemon import files
from stallwatch.errors import ConfigError


@pytest.mark.parametrize(
    ("soft", "hard", "found"),
    [
        (1024, 524288, 4096),
        (1024, resource.RLIM_INFINITY, 4096),
        (64, 1024, 1024),
        (300, 300, 300),
        (65536, 65536, 65536),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(monkeypatch, soft, hard, found):
    """Never lowered, never above what is needed, the hard limit as it was."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: set_to.append(pair))
    assert files.ensure_files() == found
    assert set_to == ([(found, hard)] if found != soft else [])


def test_too_few_are_refused(monkeypatch):
    """78 with the three places where it is raised."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match="at most 64 files") as error:
        files.ensure_files()
    assert error.value.exit_code == 78
    for words in ("ulimit -n", "LimitNOFILE=", "--ulimit nofile="):
        assert words in error.value.hint
