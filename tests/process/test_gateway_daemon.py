"""The gateway as a process beside a real daemon: what clients get while engines really fail."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from daemon_helpers import ENGINES, STALLWATCH, Daemon, free_port, gone, place, tag, toml, until

pytestmark = [pytest.mark.process, pytest.mark.slow]


class Fronted(Daemon):
    """A daemon with a [gateway] table, and clients of that gateway."""

    gateway: Mapping[str, Any] = {}

    def __init__(self, *args: Any, gateway: Mapping[str, Any] | None = None, **more: Any) -> None:
        self.front = free_port()
        self.gateway = {"listen": f"127.0.0.1:{self.front}", "drain": "2s", **(gateway or {})}
        super().__init__(*args, **more)

    def write(self, text: str | None = None) -> None:
        engines = {self.name: self.engine_config, **self.more}
        tables = {"supervisor": self.supervisor, "engines": engines, "gateway": self.gateway}
        super().write(text or toml(tables))

    def ask(self, method: str = "POST", body: str = "{}", seconds: float = 20.0) -> Any:
        """(status, headers, body) of a request through the gateway."""
        connection = http.client.HTTPConnection("127.0.0.1", self.front, timeout=seconds)
        try:
            connection.request(method, "/v1/chat/completions", body)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def later(self, *args: Any) -> Any:
        """The same in a thread: call the result to get it."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(self.ask(*args)))
        thread.start()

        def result() -> Any:
            thread.join(25)
            assert not thread.is_alive(), "the client hangs"
            return found[0]

        return result

    def wait_front(self, incarnation: int = 1) -> None:
        """Engine and gateway are ready, and the gateway knows it."""
        self.wait_ready(incarnation)
        self.wait(lambda: self.engine("gateway").get("state") == "ready", "the gateway is ready")
        self.wait(lambda: self.ask("GET")[0] == 200, "a request goes through")

    def wait_inside(self, count: int = 1) -> None:
        """The engine's front end holds so many requests."""

        def held() -> bool:
            known = self.engine().get("processes", ())
            return sum(p["pending"] for p in known if p["address"] == "api:0") == count

        self.wait(held, f"{count} requests in the engine")

    def shown(self, failure_id: str) -> dict[str, Any]:
        """`stallwatch show ID` as JSON."""
        done = self.cli("show", failure_id, "-o", "json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


def beats(found: Fronted) -> int | None:
    """How often the gateway's loop came round, once a look has seen its lane."""
    lanes = found.engine("gateway")["lanes"]
    return next((lane["work"] for lane in lanes if lane["address"] == "gateway:0/loop"), None)


def error_of(answer: Any) -> dict[str, Any]:
    status, headers, body = answer
    assert status == 503, (status, headers, body)
    return dict(json.loads(body)["error"])


def test_a_stopped_engines_clients_are_answered_by_the_gateway_and_the_next_ones_wait():
    """SIGSTOP of the whole front end: nobody in it can answer. The 503 has an id that `show` knows,
    and a request that comes meanwhile is held until the new incarnation serves it.
    """
    with place() as folder:
        found = Fronted(folder, gateway={"hold": "15s"})
        try:
            found.wait_front()
            first = found.later()
            found.wait_inside()
            os.kill(found.pid("api:0"), signal.SIGSTOP)
            answer = first()
            error = error_of(answer)
            assert error["code"] == "engine_stalled"
            assert error["kind"] == "PROCESS_STOPPED"
            assert answer[1]["x-should-retry"] == "false"
            held = found.later("GET")
            assert found.shown(error["failure_id"])["kind"] == "PROCESS_STOPPED"
            answer = held()
            assert answer[0] == 200, answer
            said = found.wait(
                lambda: (v := found.json("/v1/gateway")).get("failures") and v, "the counts"
            )
            assert said["failures"] == {error["failure_id"]: 1}
            assert found.stop() == 0
        finally:
            found.end()


def test_a_request_at_a_stopped_front_end_is_served_by_the_next_incarnation():
    """The gateway repeats it: it waits for the restart, whatever the kill does to its old connection."""
    with place() as folder:
        found = Fronted(folder, gateway={"hold": "15s", "retry": "before-first-byte"})
        try:
            found.wait_front()
            first = found.later()
            found.wait_inside()
            os.kill(found.pid("api:0"), signal.SIGSTOP)
            found.wait_ready(2)
            found.wait_inside()
            found.release()
            answer = first()
            assert answer[0] == 200, answer
        finally:
            found.end()


def test_nobody_waits_for_an_engine_that_is_not_restarted():
    """`enforce = "fail"`: it stays down for good, and `hold` is no reason to keep a client for ten minutes."""
    with place() as folder:
        found = Fronted(folder, {"enforce": "fail"}, gateway={"hold": "10m"})
        try:
            found.wait_front()
            os.kill(found.pid("api:0"), signal.SIGKILL)
            found.wait(lambda: found.engine()["state"] == "failed", "it failed")
            answer = found.ask("GET")
            error = error_of(answer)
            assert "given up" in error["message"]
            assert answer[1]["x-should-retry"] == "false"
            assert found.shown(error["failure_id"])["action"] == "fail"
            assert found.stop() == 0
        finally:
            found.end()


def test_a_killed_engine_is_explained():
    """The connection breaks before anything is declared: the client still gets the failure's id, and the
    report says that the gateway answered it, when nobody was left in the engine.
    """
    with place() as folder:
        found = Fronted(folder)
        try:
            found.wait_front()
            first = found.later()
            found.wait_inside()
            found.wait(
                lambda: found.json("/v1/gateway").get("replicas", {}).get(found.name),
                "the gateway says so",
            )
            os.kill(found.pid("api:0"), signal.SIGKILL)
            error = error_of(first())
            assert error["kind"] == "CHILD_DIED"
            assert found.shown(error["failure_id"])["engine"] == found.name
            found.wait(
                lambda: "tree gone" in str(found.shown(error["failure_id"])["timeline"]), "its end"
            )
            told = found.cli("show", error["failure_id"]).stdout
            assert "The engine's own front end was gone." in told
            assert "The gateway answered 1 request with the failure." in told
            assert "No client was waiting" not in told
        finally:
            found.end()


def test_a_silent_engine_is_a_stall_with_a_rule_of_its_own():
    """Every lane is well and the client gets nothing: the gateway's word alone leads to a report,
    and to the client's answer.
    """
    with place() as folder:
        found = Fronted(folder, gateway={"limits": {"whole_answer": "1500ms"}})
        try:
            found.wait_front()
            first = found.later()
            found.wait_inside()
            error = error_of(first())
            report = found.shown(error["failure_id"])
            assert "request-silent" in json.dumps(report)
            assert "no byte" in report["summary"]
            assert 1.4 < report["limit_s"] < 1.6
        finally:
            found.end()


def test_the_gateway_is_supervised_like_an_engine():
    """Its loop is a lane that beats; killed it is back; stopped it is a stall in the ledger."""
    with place() as folder:
        found = Fronted(folder)
        try:
            found.wait_front()
            first = found.wait(lambda: beats(found), "its loop's lane is seen")
            found.wait(lambda: (beats(found) or first) > first, "it beats")
            view = found.engine("gateway")
            os.kill(view["root_pid"], signal.SIGKILL)
            found.wait_ready(2, "gateway")
            found.wait(lambda: found.ask("GET")[0] == 200, "it serves again")
            os.kill(found.engine("gateway")["root_pid"], signal.SIGSTOP)
            report = found.wait(
                lambda: next((s for s in found.stalls() if s["kind"] == "PROCESS_STOPPED"), None),
                "a stall of the gateway",
            )
            assert report["engine"] == "gateway"
            found.wait_ready(3, "gateway")
            assert found.engine()["incarnation"] == 1, found.stalls()
        finally:
            found.end()


def test_without_a_supervisor_it_is_503_and_a_new_daemon_takes_over():
    """SIGKILL of the daemon: the gateway says so; the next daemon ends it and starts its own."""
    with place() as folder:
        found = Fronted(folder)
        try:
            found.wait_front()
            old = found.engine("gateway")["root_pid"]
            found.process.kill()
            found.process.wait(10)
            error = until(
                lambda: (a := found.ask("GET"))[0] == 503 and error_of(a), what="no supervisor"
            )
            assert error["code"] == "no_supervisor"
            found.start()
            found.wait_front(2)
            assert gone({old})
        finally:
            found.end()


def test_a_gateway_as_a_unit_of_its_own_comes_back_with_the_daemon():
    """Started beside the daemon, it serves, says 503 while there is none, and serves again."""
    with place() as folder:
        found = Fronted(folder)
        front = free_port()
        socket_path = str(found.state / "control.sock")
        argv = [STALLWATCH, "gateway", "--socket", socket_path, "--listen", f"127.0.0.1:{front}"]
        alone = subprocess.Popen([*argv, "--drain", "1s"], env=found.env, stderr=subprocess.PIPE)
        try:
            found.wait_front()
            found.front = front
            until(lambda: _status(found) == 200, what="it serves")
            found.stop()
            until(lambda: _status(found) == 503, what="it says so")
            found.start()
            until(lambda: _status(found) == 200, what="it serves again")
        finally:
            alone.terminate()
            assert alone.wait(10) == 0
            assert alone.stderr is not None
            assert alone.stderr.read() == b""
            alone.stderr.close()
            found.end()


def test_a_rolling_restart_under_load_fails_no_request():
    """Two replicas are restarted one after the other while six clients ask: every answer is 200."""
    with place() as folder, tempfile.TemporaryDirectory(dir=folder) as other:
        port = free_port()
        twin = f"{tag(folder)}-twin"
        engine = {
            "command": [sys.executable, ENGINES, "api", other, "{port}"],
            "port": port,
            "stop_grace": "5s",
            "drain": "5s",
            "limits": {"default": "5s", "start": "30s"},
            "restart": {"budget": 1000, "backoff": ["10ms"]},
        }
        found = Fronted(folder, {"limits": {"default": "5s", "start": "30s"}}, more={twin: engine})
        over = threading.Event()
        answers: list[int] = []

        def load() -> None:
            while not over.is_set():
                answers.append(found.ask("GET")[0])

        threads = [threading.Thread(target=load) for _ in range(6)]
        try:
            found.wait_front()
            found.wait_ready(1, twin)
            for thread in threads:
                thread.start()
            for name in (found.name, twin):
                before = len(answers)
                assert found.cli("restart", name).returncode == 0
                found.wait_ready(2, name)
                found.wait(lambda before=before: len(answers) > before + 50, "load goes on")
        finally:
            over.set()
            for thread in threads:
                thread.join(20)
            found.end()
        assert set(answers) == {200}


def test_the_counts_of_clients_gateway_and_ledger_are_the_same():
    """Twelve clients wait while the front end is stopped, twice in a row: each gets the one failure
    of its time, and everybody counted alike.
    """
    with place() as folder:
        found = Fronted(folder)
        try:
            found.wait_front()
            ids: list[str] = []
            for turn in (1, 2):
                asks = [found.later() for _ in range(12)]
                found.wait_inside(12)
                os.kill(found.pid("api:0"), signal.SIGSTOP)
                said = {error_of(ask())["failure_id"] for ask in asks}
                assert len(said) == 1
                ids += said
                found.wait_front(turn + 1)
            counts = found.wait(
                lambda: (f := found.json("/v1/gateway")["failures"]) and len(f) == 2 and f, "counts"
            )
            assert counts == dict.fromkeys(ids, 12)
            assert {s["id"] for s in found.stalls()} == set(ids)
            assert found.metric('stallwatch_gateway_requests_total{end="failed"}') == 24
        finally:
            found.end()


STREAMING = str(Path(__file__).parents[1] / "gateway_engine.py")


@contextlib.contextmanager
def streaming(*flags: str, **gateway: Any) -> Iterator[tuple[Fronted, openai.OpenAI]]:
    """A daemon with an engine that streams, and an openai client of its gateway."""
    with place() as folder:
        command = [sys.executable, STREAMING, str(folder), "{port}", *flags]
        found = Fronted(folder, {"command": command}, gateway={"hold": "15s", **gateway})
        url = f"http://127.0.0.1:{found.front}/v1"
        try:
            found.wait_front()
            with openai.OpenAI(base_url=url, api_key="k", timeout=20) as client:
                yield found, client
        finally:
            found.end()


def read(client: openai.OpenAI, tokens: list[str], **more: Any) -> openai.APIError | None:
    """Stream into `tokens`; the error that ended it, None for a whole answer."""
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
    try:
        for chunk in client.chat.completions.create(**ask):
            tokens.append(chunk.choices[0].delta.content)  # noqa: PERF401 - kept if it breaks off
    except openai.APIError as error:
        return error
    return None


def test_a_stream_of_a_stopped_engine_ends_with_the_failure_and_the_next_one_is_whole():
    """The openai client has its tokens and then a typed error with the id that `show` knows."""
    with streaming() as (found, client):
        tokens: list[str] = []
        errors: list[Any] = []
        thread = threading.Thread(target=lambda: errors.append(read(client, tokens)))
        thread.start()
        found.wait(lambda: len(tokens) > 3, "tokens flow")
        os.kill(found.pid("api:0"), signal.SIGSTOP)
        thread.join(20)
        assert not thread.is_alive(), "the client hangs"
        error = errors[0]
        assert error is not None
        assert error.code == "engine_stalled"
        assert found.shown(error.body["failure_id"])["kind"] == "PROCESS_STOPPED"
        again: list[str] = []
        assert read(client, again, max_tokens=5) is None  # held until the engine is back
        assert again == [f"t{n}" for n in range(5)]


def test_an_engine_that_is_well_and_sends_nothing_is_found_by_its_clients():
    """Its lanes idle, nothing is pending, the stream is silent: request-silent, and a restart."""
    with streaming(limits={"between_tokens": "1s"}) as (found, client):
        tokens: list[str] = []
        errors: list[openai.APIError | None] = []
        quiet = found.folder / "quiet"
        thread = threading.Thread(target=lambda: errors.append(read(client, tokens)))
        thread.start()
        found.wait(lambda: len(tokens) > 3, "tokens flow")
        quiet.touch()
        thread.join(20)
        quiet.unlink()
        assert not thread.is_alive(), "the client hangs"
        error = errors[0]
        assert error is not None
        report = found.shown(error.body["failure_id"])
        assert "request-silent" in json.dumps(report)
        assert "between_tokens" in json.dumps(report)
        assert report["limit_s"] == 1.0
        assert read(client, [], max_tokens=5) is None


def test_a_request_lost_behind_the_gateway_does_not_accuse_an_engine_that_serves_others_past_it():
    """A direct client streams on; the gateway's own request gets nothing. It ends with 504 and is told
    as lost; there is no verdict, and the engine and the direct stream live on.
    """
    limits = {"whole_answer": "6s", "first_token": "6s"}
    with streaming("counts", limits=limits) as (found, _client), direct(found) as stream:
        status, _, body = found.ask(body='{"lost": true}')
        assert status == 504, body
        error = json.loads(body)["error"]
        assert error["code"] == "request_lost"
        found.wait(lambda: found.said("1 request"), "it is told")
        told = next(e for e in found.events() if e["type"] == "request-lost")
        assert told["engine"] == found.name
        assert found.metric('stallwatch_gateway_requests_total{end="request_lost"}') == 1
        seen = len(stream)
        found.wait(lambda: len(stream) > seen, "the direct stream flows")
        assert found.stalls() == []
        assert found.engine()["incarnation"] == 1


def test_without_others_that_are_served_the_same_silence_is_a_stall():
    """The same engine, the same lost request, and nobody else: it is accused, as before."""
    with streaming("counts", limits={"whole_answer": "4s"}) as (found, _client):
        error = error_of(found.ask(body='{"lost": true}'))
        assert "request-silent" in json.dumps(found.shown(error["failure_id"]))


@contextlib.contextmanager
def direct(found: Fronted) -> Iterator[list[bytes]]:
    """What a client that knows no gateway streams meanwhile."""
    got: list[bytes] = []
    connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=30)

    def run() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            connection.request("POST", "/v1/chat/completions", '{"max_tokens": 100000}')
            got.extend(connection.getresponse())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        found.wait(lambda: got, "the direct client is served")
        yield got
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        connection.close()


def test_signals_to_the_daemon_end_each_stream_in_words():
    """The first one lets the gateway finish within its drain; at the second, which kills engines, a
    client in the middle of its stream still gets an error event, and none a reset.
    """
    with streaming(drain="60s") as (found, client):
        errors: list[Any] = []
        tokens: list[list[str]] = [[], []]
        threads = [
            threading.Thread(target=lambda t=t: errors.append(read(client, t, max_tokens=4000)))
            for t in tokens
        ]
        for thread in threads:
            thread.start()
        found.wait(lambda: all(len(t) > 3 for t in tokens), "tokens flow")
        found.process.send_signal(signal.SIGINT)
        found.wait(lambda: found.engine().get("state") in ("stopping", "draining"), "it stops")
        seen = len(tokens[0])
        found.wait(lambda: len(tokens[0]) > seen + 5, "what runs may finish")
        assert not errors
        found.process.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a client hangs"
        for error in errors:
            assert isinstance(error, openai.APIError)
            assert not isinstance(error, openai.APIConnectionError), repr(error)
            assert error.code in ("engine_stalled", "gateway_stopping")
        assert found.wait_exit() == 0


def test_one_signal_ends_streams_that_are_longer_than_the_drain():
    """The gateway's drain is over before the answer: an error event, no reset, no silent end."""
    with streaming(drain="1s") as (found, client):
        tokens: list[str] = []
        errors: list[Any] = []
        thread = threading.Thread(
            target=lambda: errors.append(read(client, tokens, max_tokens=4000))
        )
        thread.start()
        found.wait(lambda: len(tokens) > 3, "tokens flow")
        found.process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert not thread.is_alive(), "the client hangs"
        assert errors[0].code in ("engine_stalled", "gateway_stopping")
        assert found.wait_exit() == 0


def test_a_restart_waits_for_streams_that_only_the_gateway_knows():
    """The engine counts no requests; a restart is asked for in the middle of a stream, and the
    stream is whole.
    """
    with streaming() as (found, client):
        tokens: list[str] = []
        errors: list[Any] = []
        thread = threading.Thread(target=lambda: errors.append(read(client, tokens, max_tokens=80)))
        thread.start()
        found.wait(lambda: len(tokens) > 3, "tokens flow")
        assert found.cli("restart", found.name).returncode == 0
        thread.join(20)
        assert errors == [None]
        assert tokens == [f"t{n}" for n in range(80)]
        found.wait(lambda: found.engine()["incarnation"] == 2, "it restarts")


def _status(found: Fronted) -> int:
    try:
        return int(found.ask("GET")[0])
    except OSError:
        return 0
