"""Whose bits on a secret's file let others in, for every owner and group."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from stallwatch import rights

US, OURS, EXTRA, OTHER = 1000, 1001, 44, 100


def status(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.fixture(autouse=True)
def who(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A daemon as uid 1000 (stallwatch), its group of the same name, and one more group."""
    found = SimpleNamespace(name="stallwatch", members=[])
    monkeypatch.setattr(os, "geteuid", lambda: US)
    monkeypatch.setattr(os, "getegid", lambda: OURS)
    monkeypatch.setattr(os, "getgroups", lambda: [OURS, EXTRA])
    monkeypatch.setattr(
        rights.grp,
        "getgrgid",
        lambda gid: SimpleNamespace(gr_name=found.name, gr_mem=found.members),
    )
    monkeypatch.setattr(rights.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="stallwatch"))
    return found


@pytest.mark.parametrize(
    ("mode", "uid", "gid"),
    [
        (0o600, US, OTHER),
        (0o400, 0, 0),
        (0o640, 0, OURS),  # install -m 0640 -g stallwatch
        (0o440, 0, EXTRA),  # a Secret in a pod with fsGroup
        (0o440, 0, 0),  # a credential of systemd: the mask of its ACL
        (0o640, US, OURS),
    ],
)
def test_good(mode: int, uid: int, gid: int) -> None:
    """Only we, root, or the group that root chose for us."""
    assert not rights.is_loose(status(mode, uid, gid))


@pytest.mark.parametrize(
    ("mode", "uid", "gid"),
    [
        (0o644, 0, OURS),
        (0o604, US, OURS),
        (0o601, US, OURS),
        (0o602, US, OURS),
        (0o660, 0, OURS),
        (0o650, 0, OURS),
        (0o640, 0, OTHER),
        (0o640, US, EXTRA),
        (0o640, OTHER, OURS),
    ],
)
def test_loose(mode: int, uid: int, gid: int) -> None:
    """Others, a group that may write, or a group that is not ours."""
    assert rights.is_loose(status(mode, uid, gid))


def test_a_group_of_many_is_not_our_own(who: SimpleNamespace) -> None:
    """`users` as everybody's first group, or one more member in ours: 0640 lets them in."""
    who.members = ["alice"]
    assert rights.is_loose(status(0o640, US, OURS))
    who.members, who.name = [], "users"
    assert rights.is_loose(status(0o640, US, OURS))


def test_a_group_without_a_name_is_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without /etc/group entries: nobody says who is in it."""

    def nobody(_: int) -> object:
        raise KeyError

    monkeypatch.setattr(rights.grp, "getgrgid", nobody)
    assert rights.is_loose(status(0o640, US, OURS))
