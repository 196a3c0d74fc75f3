"""The ends of an engine: whatever dies, stalls or stops, every waiting client gets one explicit answer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import openai
import pytest

from api_helpers import MODEL, PATHS, free_port, serving, stop, write_checkpoint
from heartbeat_helpers import CLOCK, folder_in
from stallwatch.board.control import ControlWriter
from stallwatch.board.reader import BoardReader
from stallwatch.heartbeat.failure import Failure
from stallwatch_engine.vllm_plugin.apifail import error_object

pytestmark = [pytest.mark.process, pytest.mark.slow]
FAILURE = Failure(
    "st-20261130T031502Z-9f2c41aa",
    "chat",
    3,
    "DEVICE_WAIT",
    "worker:0/model",
    "execute_model",
    61.0,
    60.0,
    "restart",
)
WAITING = 4


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "checkpoint")


def complete(client, prompt, **more):
    return client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 200} | more)


class Crowd:
    """Clients that wait: half for a whole answer, half inside a stream of which they have the text."""

    def __init__(self, api) -> None:
        self.api = api
        self.texts: list[str] = []
        self.client = api.client()
        assert self.client.completions  # imported on first use, which threads must not race for
        self.pool = concurrent.futures.ThreadPoolExecutor(WAITING)
        self.found = [self.pool.submit(self._ask, number % 2 == 0) for number in range(WAITING)]
        api.until(lambda: self._waiting() == (WAITING, WAITING // 2))

    def _waiting(self) -> tuple[float, int]:
        for future in self.found:
            if future.done():
                raise AssertionError(f"a client did not wait: {future.result()}")
        return self.api.metric("requests_in_flight"), len(self.texts)

    def _ask(self, stream: bool) -> tuple[bool, openai.APIError | None]:
        try:
            answer = complete(self.client, "hang:abc", stream=stream)
            text = ""
            for chunk in answer if stream else []:
                text += chunk.choices[0].text
                if text == "abc":
                    self.texts.append(text)
        except openai.APIError as error:
            return stream, error
        return stream, None

    def answers(self) -> list[tuple[bool, openai.APIError | None]]:
        """What each client got, in time."""
        found = [future.result(timeout=15) for future in self.found]
        self.pool.shutdown()
        self.client.close()
        return found

    def errors(self) -> list[tuple[bool, openai.APIError]]:
        """The same, which must be the engine's word and not a broken connection."""
        found = self.answers()
        for stream, error in found:
            assert error is not None
            assert not isinstance(error, openai.APIConnectionError)
            if not stream:
                assert isinstance(error, openai.InternalServerError)
                assert error.response.headers["x-should-retry"] == "false"
        return found


@pytest.mark.parametrize("end", ["die", "tear", "garbage", "stranger", "fail_all", "kill"])
def test_a_lost_worker_is_an_explicit_answer_to_all_and_503_to_the_next(folder, end):
    """Death, a torn frame, nonsense, made-up ids, its own word: nobody hangs, nobody is cut short."""
    with serving(folder) as api:
        crowd = Crowd(api)
        if end == "kill":
            api.worker.kill()
        else:
            with api.client() as client, pytest.raises(openai.APIError):
                complete(client, end)
        for _stream, error in crowd.errors():
            assert error.code == "engine_stalled"
            assert error.body["kind"] in {"CHILD_DIED", "DEVICE_WAIT"}
        with api.client() as client, pytest.raises(openai.InternalServerError) as caught:
            complete(client, "echo:a")
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert api.get("/health")[0] == 503
        assert api.metric("requests_in_flight") == api.metric("worker_up") == 0


def test_a_stopped_worker_is_answered_by_deadlines(folder):
    """A worker that says nothing any more: queueing counts, and no request outlives its time."""
    with serving(folder, "--timeout", "1") as api:
        api.worker.send_signal(signal.SIGSTOP)
        with api.client() as client, pytest.raises(openai.APIStatusError) as caught:
            complete(client, "echo:a")
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


@pytest.fixture
def board(tmp_path):
    with folder_in(tmp_path) as found:
        yield found


def api_process(board):
    """(process, lane) of the api on the board."""
    with contextlib.closing(BoardReader(board.path)) as reader:
        image = reader.look(CLOCK)
    (process,) = [process for process in image.processes if process.role == "api"]
    (lane,) = [lane for lane in image.lanes if lane.name == "loop"]
    return process, lane


def test_the_board_shows_a_beating_loop_readiness_and_what_is_pending(folder, board):
    """What the supervisor judges the api by."""
    with serving(folder, env=board.environment()) as api:
        process, before = api_process(board)
        assert (process.pid, process.address) == (api.process.pid, "api:0")
        api.until(lambda: api_process(board)[0].ready)
        api.until(lambda: api_process(board)[1].stack[0].entered_ns > before.stack[0].entered_ns)
        with api.raw({"prompt": "hang"}):
            api.until(lambda: api_process(board)[0].pending == 1)
        api.until(lambda: api_process(board)[0].pending == 0)


def test_the_supervisors_failure_is_every_clients_answer(folder, board):
    """503 with the FAILURE in an OpenAI error object, an error event in a stream, zero pending after."""
    with serving(folder, env=board.environment()) as api:
        crowd = Crowd(api)
        control = ControlWriter(board.file)
        began = time.monotonic()
        control.declare(FAILURE)
        for stream, error in crowd.errors():
            assert error.body == error_object(FAILURE)["error"]
            assert stream or error.status_code == 503
        assert time.monotonic() - began < 5  # the bar is 2 s; machines that run tests are loaded
        api.until(lambda: api_process(board)[0].pending == 0)
        with api.client() as client, pytest.raises(openai.InternalServerError) as caught:
            complete(client, "echo:a")
        assert caught.value.body["failure_id"] == FAILURE.id
        assert caught.value.response.headers["retry-after"]
        assert api.metric('requests_total{source="board_failure"}') == WAITING
        control.close()


def test_an_observed_failure_is_no_answer(folder, board):
    """enforce = "observe": written down by the supervisor, invisible to clients."""
    with serving(folder, env=board.environment()) as api:
        control = ControlWriter(board.file)
        control.declare(FAILURE._replace(action="observe"))
        with api.client() as client:
            assert complete(client, "paced:abcdefghij").choices[0].text == "abcdefghij"
        control.close()


def test_a_declared_death_carries_the_supervisors_id(folder, board):
    """Worker dead, FAILURE declared a moment later: clients learn the id, not only that it died."""
    with serving(folder, env=board.environment()) as api:
        crowd = Crowd(api)
        api.worker.kill()
        control = ControlWriter(board.file)
        control.declare(FAILURE._replace(kind="CHILD_DIED"))
        assert {error.body["failure_id"] for _, error in crowd.errors()} == {FAILURE.id}
        control.close()


def test_a_stop_lets_answers_finish_and_then_ends(folder):
    """SIGTERM: the running stream is completed, nothing new is taken, exit status 0."""
    with serving(folder) as api:
        with api.client() as client:
            stream = iter(complete(client, "paced:abcdefghijklmnop", stream=True))
            text = next(stream).choices[0].text
            stop(api.process)
            text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == "abcdefghijklmnop"
        assert api.process.wait(timeout=15) == 0


def test_a_stop_ends_what_does_not_finish_with_an_explicit_answer(folder):
    """After the drain time the rest gets 503 or an error event, not a closed connection."""
    with serving(folder, "--drain", "0.3") as api:
        crowd = Crowd(api)
        stop(api.process)
        assert {error.code for _, error in crowd.answers()} == {"shutdown"}
        assert api.process.wait(timeout=15) == 0


@pytest.mark.parametrize("broken", ["tokenizer", "host", "fd"])
def test_what_has_to_be_corrected_is_said_at_once(folder, broken):
    """Exit status 2 and one line with the file or the address."""
    near, far = socket.socketpair()
    fd = 99 if broken == "fd" else near.fileno()
    options = ["--model", str(folder), "--worker-fd", str(fd), "--port", str(free_port())]
    if broken == "tokenizer":
        os.unlink(folder / "tokenizer.json")
    if broken == "host":
        options += ["--host", "203.0.113.1"]
    done = subprocess.run(
        [sys.executable, "-m", "stallwatch_engine.api.main", *options],
        check=False,
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=50,
        pass_fds=[near.fileno()],
    )
    near.close()
    far.close()

    assert done.returncode == 2
    said = {"tokenizer": "tokenizer.json", "host": "203.0.113.1", "fd": "--worker-fd 99"}
    assert said[broken] in done.stderr
    assert "Traceback" not in done.stderr
