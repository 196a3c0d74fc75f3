"""The embedded engine under the real supervisor: a stall is proved, told to the client, and the engine serves again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import threading
from pathlib import Path

import openai
import pytest

from daemon_helpers import STALLWATCH, daemon, gone, place
from serve_helpers import bodies
from stallwatch_engine.checkpoint.tiny import make_tiny

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]
LAUNCHER = str(Path(__file__).resolve().parents[1] / "first_faulty.py")
READY_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path / "tiny")
    return path / "tiny"


def command(folder, faults: str, *options: str) -> list[str]:
    engine = [STALLWATCH, "engine", "serve", "--model", str(folder), "--port", "{port}", *options]
    return [sys.executable, LAUNCHER, "{incarnation}", faults, *engine] if faults else engine


def settings(folder, faults: str, *options: str, limit: str = "5s") -> dict:
    return {
        "command": command(folder, faults, "--served-name", "chat", *options),
        "ready": {"http": "/health"},
        "limits": {"default": limit, "compile": limit, "start": "10m"},
    }


def ready(run, incarnation: int = 1):
    def there():
        view = run.engine()
        return view if view.get("state") == "ready" and view["incarnation"] >= incarnation else None

    return run.wait(there, f"READY, incarnation {incarnation}", READY_S)


def ask(run, prompt="hello", max_tokens=6):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{run.port}/v1", api_key="x", max_retries=0, timeout=90
    ) as client:
        return client.completions.create(
            model="chat", prompt=prompt, max_tokens=max_tokens, extra_body={"ignore_eos": True}
        )


def test_a_stalled_output_is_named_told_and_the_next_incarnation_serves(folder):
    """An output event that never completes, with no limit of the engine's own in reach: the supervisor's
    verdict names the wait, the client has the FAILURE's id, and incarnation 2 answers."""
    given = settings(folder, "event.never@output", "--step-timeout", "600")
    with place() as path, daemon(path, given) as run:
        view = ready(run)
        members = {int(p["pid"]) for p in view["processes"]}
        lanes = {p["address"] for p in view["processes"]}
        assert {"api:0", "worker:0"} <= lanes
        with pytest.raises(openai.APIStatusError) as failed:
            ask(run)
        told = bodies(failed.value)
        assert failed.value.status_code == 503
        assert told["code"] == "engine_stalled"
        report = run.wait_stall(seconds=60)
        assert told["failure_id"] == report["id"]
        assert report["culprit"]["role"] == "worker"
        ready(run, 2)
        assert gone(members)
        assert ask(run).usage.completion_tokens == 6


def test_the_old_input_mode_is_named_a_circle(folder):
    """One event for all input copies, in a whole engine: ORDER_CYCLE with its three edges, and what follows."""
    given = settings(
        folder, "inputs.shared_event", "--ple-backend", "process", "--step-timeout", "600"
    )
    with place() as path, daemon(path, given) as run:
        ready(run)
        with pytest.raises(openai.APIStatusError) as failed:
            ask(run, max_tokens=40)
        report = run.wait_stall(seconds=60)
        assert bodies(failed.value)["failure_id"] == report["id"]
        ready(run, 2)
        report = run.report(report["id"])  # final now
        lanes = {lane["address"] for p in report["processes"] for lane in p["lanes"]}
        own = ("scheduler", "model", "copy", "output", "ple-request", "stream/model", "wire")
        assert lanes == {"api:0/loop", "offload:0/ple", *(f"worker:0/{name}" for name in own)}
        assert report["kind"] == "ORDER_CYCLE"
        edges = {(edge["waiter"], edge["target"]) for edge in report["wait_graph"]["edges"]}
        assert edges >= {
            ("worker:0/stream/model", "offload:0/ple"),
            ("offload:0/ple", "worker:0/ple-request"),
            ("worker:0/ple-request", "worker:0/stream/model"),
        }
        assert ask(run).usage.completion_tokens == 6


def test_a_held_gil_is_a_failure_and_the_engine_serves_again(folder):
    """The worker's model thread keeps the GIL: proved from outside, told to the client, replaced."""
    given = settings(folder, "worker.hold_gil@12=60000", "--step-timeout", "600")
    with place() as path, daemon(path, given) as run:
        ready(run)
        with pytest.raises(openai.APIStatusError) as failed:
            ask(run, max_tokens=40)
        report = run.wait_stall(seconds=60)
        assert bodies(failed.value)["failure_id"] == report["id"]
        assert report["culprit"]["role"] == "worker"
        ready(run, 2)
        assert ask(run).usage.completion_tokens == 6


def test_a_stopped_offload_process_is_the_culprit(folder):
    """SIGSTOP to the offload process under load: the loud waiters are not accused, it is, and the client is told."""
    given = settings(folder, "", "--ple-backend", "process", "--step-timeout", "600")
    with place() as path, daemon(path, given) as run:
        ready(run)
        offload = run.pid("offload:0")
        outcome: list[BaseException | None] = []

        def load() -> None:
            try:
                for _ in range(400):
                    ask(run, "load", 200)
            except openai.APIError as error:
                outcome.append(error)

        client = threading.Thread(target=load)
        client.start()
        run.wait(lambda: run.engine().get("state") == "ready", "load runs")
        os.kill(offload, signal.SIGSTOP)
        report = run.wait_stall(seconds=60)
        client.join(60)
        assert outcome
        assert report["culprit"]["pid"] == offload
        assert report["kind"] == "PROCESS_STOPPED"
        ready(run, 2)
        assert ask(run).usage.completion_tokens == 6


def test_a_worker_that_ends_itself_in_a_step_is_told_and_the_next_incarnation_serves(folder):
    """The worker dies as it is to launch a step of a stream: the client reads tokens and then the FAILURE
    with the report's id, never a plain end, and incarnation 2 answers in full. Killed while nothing is asked
    of it, it is a failure as well, and incarnation 3 serves."""
    given = settings(folder, "worker.crash@12", "--ple-backend", "process")
    with place() as path, daemon(path, given) as run:
        members = {int(p["pid"]) for p in ready(run)["processes"]}
        told = cut_off(run)
        report = run.wait_stall(seconds=60)
        assert told["failure_id"] == report["id"]
        assert told["code"] == "engine_stalled"
        assert report["culprit"]["role"] == "worker"
        assert report["incarnation"] == 1
        view = ready(run, 2)
        assert gone(members)
        assert ask(run).usage.completion_tokens == 6
        members = {int(p["pid"]) for p in view["processes"]}
        os.kill(run.pid("worker:0"), signal.SIGKILL)
        ready(run, 3)
        again = run.wait_stall({report["id"]}, seconds=60)
        assert (again["incarnation"], again["culprit"]["role"]) == (2, "worker")
        assert gone(members)
        assert ask(run).usage.completion_tokens == 6


def test_a_blocked_front_end_is_the_culprit_and_not_the_worker_that_waits_for_it(folder):
    """The loop of the api stands under load, its socket fills up, and the worker's limits are over long
    before the loop's own: nobody is accused until that one is, and then it is named.
    """
    given = settings(folder, "", "--step-timeout", "600", limit="4s")
    given["limits"]["loop"] = "14s"
    with place() as path, daemon(path, given, supervisor={"chaos": True}) as run:
        ready(run)
        began, over = threading.Semaphore(0), threading.Event()
        clients = [threading.Thread(target=listen, args=(run, began, over)) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            for _ in clients:
                assert began.acquire(timeout=60)
            inject = ("inject", run.name, "block", "--on", "api:0", "--for", "60s")
            done = run.cli("chaos", *inject, "-o", "json", seconds=120)
            report = run.wait_stall(seconds=60)
        finally:
            over.set()
        for client in clients:
            client.join(60)
        assert (report["kind"], report["culprit"]["lane"]) == ("FRONTEND_BLOCKED", "api:0/loop")
        waits = {(e["waiter"], e["target"]) for e in report["wait_graph"]["edges"]}
        assert ("worker:0/scheduler", "api:0/loop") in waits
        assert done.returncode == 0, done.stdout
        ready(run, 2)
        assert ask(run).usage.completion_tokens == 6


def listen(run, began: threading.Semaphore, over: threading.Event) -> None:
    """Long streams, one after the other; `began` at the first token. Their end is not what is tested."""
    told = False
    asked = {"model": "chat", "prompt": "hello", "max_tokens": 4000, "stream": True}
    body = json.dumps({**asked, "ignore_eos": True})
    while not over.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", run.port, timeout=60)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("POST", "/v1/completions", body)
            for _ in connection.getresponse():
                if not told:
                    began.release()
                told = True
                if over.is_set():
                    return
        over.wait(0.1)


def cut_off(run) -> dict:
    """The error object that ends a stream of 40 tokens after its first ones."""
    said, told = 0, None
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{run.port}/v1", api_key="x", max_retries=0, timeout=90
    ) as client:
        parts = client.completions.create(
            model="chat",
            prompt="hello",
            max_tokens=40,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        try:
            for part in parts:
                said += part.choices[0].finish_reason is None
        except openai.APIError as error:
            told = error.body
    assert 0 < said < 40
    assert isinstance(told, dict)
    return told


def test_quiet_hours_are_no_stall(folder):
    """Ready, asked, and left alone past every limit: no verdict."""
    given = settings(folder, "", limit="2s")
    with place() as path, daemon(path, given) as run:
        ready(run)
        assert ask(run).usage.completion_tokens == 6
        silent = threading.Event()
        assert not silent.wait(6.0)  # three limits long: what is proved is that nothing happens
        assert run.stalls() == []
        assert run.engine()["state"] == "ready"
