"""A real daemon tells of real failures, and its secret stays with it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from daemon_helpers import Daemon, place, toml
from hooks_helpers import SECRET, receiver
from stallwatch.hooks.signing import sign

pytestmark = [pytest.mark.process, pytest.mark.slow]

KEEPS = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read() + b'\\n')"
HANGS = "import time; time.sleep(600)"
DIES = {"command": [sys.executable, "-c", "raise SystemExit(3)"], "port": None}
HIDDEN = ("T0123456789abcdef", SECRET.decode())


class Hooked(Daemon):
    """A daemon with a [hooks] table."""

    def __init__(self, folder: Path, *args: Any, hooks: Mapping[str, Any], **more: Any) -> None:
        self.hooks = dict(hooks)
        super().__init__(folder, *args, **more)

    def write(self, text: str | None = None) -> None:
        engines = {self.name: self.engine_config}
        tables = {"supervisor": self.supervisor, "engines": engines, "hooks": self.hooks}
        super().write(text or toml(tables))

    def messages(self) -> str:
        return "\n".join(event["message"] for event in self.events())


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def files(folder: Path) -> str:
    found = [p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return b"\n".join(found).decode("latin-1")


def test_a_stall_and_the_recovery_are_told_both_ways_and_the_secret_is_nowhere(folder):
    """A receiver that fails first and a command: FAILURE, then recovered; the key leaves by no way."""
    kept = folder / "told.jsonl"
    with receiver([503, 200]) as there:
        hooks = {
            "webhook": there.url, "secret_env": "HOOK_SECRET", "backoff": ["20ms"],
            "command": [sys.executable, "-c", KEEPS, str(kept)],
        }  # fmt: skip
        run = Hooked(folder, hooks=hooks, env={"HOOK_SECRET": SECRET.decode()})
        try:
            run.wait_ready()
            assert SECRET not in Path(f"/proc/{run.pid('worker:0')}/environ").read_bytes()
            run.order("worker", "stall")
            report = run.wait_stall()
            run.wait_ready(2)
            there.wait(3)
            run.wait(lambda: kept.exists() and kept.read_text().count("\n") == 2, "the command")
            run.wait(lambda: "hook-webhook: recovered" in run.messages(), "told in the events")
            said = run.messages()
            shown = [said, run.log(), files(run.state), run.cli("status").stdout]
            shown += [run.cli(*words).stdout for words in (["events"], ["show", report["id"]])]
            shown.append(run.cli("describe", run.name).stdout + repr(run.report(report["id"])))
        finally:
            run.end()
    shown.append(run.log() + files(run.state))
    bodies = [json.loads(each.body) for each in there.got]
    assert [b["event"] for b in bodies] == ["stall", "stall", "recovered"]
    assert [json.loads(line) for line in kept.read_text().splitlines()] == bodies[1:]
    failure = bodies[1]["failure"]
    assert {k: failure[k] for k in ("id", "kind", "action")} == {
        "id": report["id"], "kind": failure["kind"], "action": "restart",
    }  # fmt: skip
    assert failure["culprit"] == "worker:0/model"
    assert failure["phase"] == "execute_model"
    assert failure["elapsed_s"] >= failure["limit_s"] > 0
    for each in there.got:
        time = int(each.headers["Stallwatch-Timestamp"])
        assert each.headers["Stallwatch-Signature"] == sign(SECRET, time, each.body)
    assert f"stall {report['id']} was delivered at attempt 2" in said
    for text in shown:
        for word in HIDDEN:
            assert word not in text


def test_the_last_word_of_a_daemon_that_gives_up_goes_out(folder):
    """EXHAUSTED ends the daemon: the webhook still has it; a command that hangs does not hold it up."""
    with receiver() as there:
        hooks = {"webhook": there.url, "command": [sys.executable, "-c", HANGS]}
        run = Hooked(folder, DIES, hooks=hooks, supervisor={"exit_when": "all"})
        try:
            assert run.wait_exit(60) in (1, 3)
        finally:
            run.end()
    assert json.loads(there.got[-1].body)["event"] == "exhausted"
    assert "was killed: this daemon ends" in run.log()


def test_a_command_that_is_missing_disturbs_nothing(folder):
    """It is told as a fault, and the engine is ended and started again as ever."""
    run = Hooked(folder, hooks={"command": [str(folder / "missing")]})
    try:
        run.wait_ready()
        run.order("worker", "stall")
        run.wait_ready(2)
        run.wait(lambda: run.said("cannot start missing: No such file"), "the fault")
    finally:
        run.end()


def test_an_observed_stall_that_moves_again_is_told_as_recovered(folder):
    """Nothing was killed: the same FAILURE stands in both notices, and only what is wanted is told."""
    with receiver() as there:
        hooks = {"webhook": there.url, "events": ["recovered"]}
        run = Hooked(folder, {"enforce": "observe"}, hooks=hooks)
        try:
            run.wait_ready()
            run.order("worker", "stall")
            report = run.wait_stall()
            run.wait_state("stalled")
            run.release()
            there.wait(1)
            assert run.wait_ready()["incarnation"] == 1
        finally:
            run.end()
    (body,) = (json.loads(each.body) for each in there.got)
    assert body["event"] == "recovered"
    assert body["failure"]["id"] == report["id"]
    assert body["failure"]["action"] == "observe"
    assert "Stallwatch-Signature" not in there.got[0].headers


@pytest.mark.parametrize("loose", ["config", "secret"])
def test_a_secret_that_others_can_read_is_refused(folder, loose):
    """Exit 78 and a sentence with the mend, before anything is started."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o644 if loose == "secret" else 0o600)
    # touch() in the helper leaves the mode of a file that is there
    (folder / "stallwatch.toml").touch(mode=0o600)
    os.chmod(folder / "stallwatch.toml", 0o644 if loose == "config" else 0o600)
    url = "http://127.0.0.1:9/services/T0123456789abcdef"
    run = Hooked(folder, hooks={"webhook": url, "secret_file": str(secret)})
    try:
        assert run.wait_exit() == 78
    finally:
        run.end()
    assert "chmod 600" in run.log()
    assert not any(word in run.log() for word in HIDDEN)
    assert not (run.state / "engines").exists() or loose == "secret"
