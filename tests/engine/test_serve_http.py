"""The engine as a service: api, worker and offload process, judged by the openai client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
import torch

from daemon_helpers import free_port
from serve_helpers import END_S, MODEL, bodies, served, spoiled, start
from stallwatch_engine.checkpoint.tiny import make_tiny

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path / "tiny")
    return path / "tiny"


@pytest.fixture(scope="module")
def engine(folder):
    with served(folder, "--max-num-seqs", "4") as found:
        yield found


def ids(engine, prompt, many=12):
    return engine.complete(prompt, many).choices[0].text


def test_ten_requests_of_every_shape_end_well(engine):
    """Four, three, two, one, two, three, four, one at a time: ten requests, ten answers, those of each alone."""
    prompts = [f"request number {n} " * (1 + n % 4) for n in range(10)]
    alone = [ids(engine, prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: ids(engine, p), prompts))
    assert together == alone
    found = []
    for many in (4, 3, 2, 1):
        with ThreadPoolExecutor(many) as pool:
            found += pool.map(lambda p: ids(engine, p), prompts[len(found) : len(found) + many])
    assert found == alone


def test_one_request_of_7168_tokens(engine):
    """A prompt of 7,104 tokens and 64 new ones: 200, and the usage says so."""
    found = engine.complete("x" * 7104, 64)
    assert found.usage.prompt_tokens == 7104
    assert found.usage.completion_tokens == 64
    assert found.choices[0].finish_reason == "length"


def test_a_stream_is_the_same_text(engine):
    """Token by token over server-sent events: what the plain answer holds."""
    whole = ids(engine, "a stream", 20)
    parts = engine.complete("a stream", 20, stream=True)
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole


def test_sampling_is_the_seeds(engine):
    """The same seed, the same text, in a batch too; another seed another one; log-probabilities where asked."""

    def drawn(seed: int) -> str:
        return engine.complete("dice", 16, temperature=1.0, seed=seed).choices[0].text

    one = drawn(1)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(drawn, [1, 1, 1])) == {one}
    assert drawn(2) != one
    found = engine.complete("dice", 5, logprobs=3).choices[0].logprobs
    assert len(found.token_logprobs) == 5
    assert all(value <= 0 for value in found.token_logprobs)


def test_a_disconnect_frees_what_it_held(engine):
    """A client that leaves in the middle: its request is aborted and its pages come back."""
    stream = engine.complete("leaving", 4000, stream=True)
    next(iter(stream))
    assert engine.until(lambda: engine.metric("worker_running") >= 1)
    stream.close()
    assert engine.until(lambda: engine.metric("worker_running") == 0)


def test_a_prompt_over_capacity_is_400(engine):
    """Prompt and answer longer than the model: refused by name, and nothing is held."""
    with pytest.raises(openai.BadRequestError) as refused:
        engine.complete("x" * 16380, 64)
    assert bodies(refused.value)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("backend", ["process", "disk"])
def test_the_other_backends_say_the_same(engine, folder, tmp_path, backend):
    """Tables in a process of their own, or on disk: the resident engine's answers."""
    options = ["--ple-backend", backend, "--max-num-seqs", "2"]
    if backend == "disk":
        options += ["--ple-folder", str(tmp_path / "tables")]
    with served(folder, *options) as other:
        assert len(other.children("offload")) == (backend == "process")
        for prompt in ("one", "two of them", "three " * 9):
            assert ids(other, prompt) == ids(engine, prompt)


def test_logits_that_are_not_finite_fail_their_request_alone(folder, tmp_path):
    """A prompt with a spoiled token gets an error; those beside it are served."""
    bad = spoiled(folder, tmp_path / "spoiled", token=ord("~") - 33)
    with served(bad, "--max-num-seqs", "3") as engine:
        with ThreadPoolExecutor(3) as pool:
            good = [pool.submit(ids, engine, f"fine {n}") for n in range(2)]
            with pytest.raises(openai.APIStatusError) as refused:
                ids(engine, "not ~ fine")
            assert all(each.result(60) for each in good)
        assert bodies(refused.value)["code"] == "nan_logits"
        assert ids(engine, "fine again")


def test_sigterm_lets_requests_finish(folder):
    """What is being answered ends with 200; then api, worker and offload process are gone, status 0."""
    with served(folder, "--ple-backend", "process") as engine:
        below = psutil.Process(engine.process.pid).children(recursive=True)
        assert len(below) == 2
        parts = engine.complete("until the end", 300, stream=True)
        next(iter(parts))
        engine.process.send_signal(signal.SIGTERM)
        assert [part.choices[0].finish_reason for part in parts][-1] == "length"
        assert engine.process.wait(END_S) == 0
        assert psutil.wait_procs(below, timeout=5)[1] == []


def test_a_killed_worker_is_told_to_its_clients(folder):
    """SIGKILL to the worker: its clients get an error at once, the service ends with a status that says so."""
    with served(folder, "--ple-backend", "process") as engine:
        (worker,) = engine.children("worker")
        (offload,) = engine.children("offload")
        parts = engine.complete("without end", 4000, stream=True)
        next(iter(parts))
        worker.kill()
        with pytest.raises(openai.APIError):
            list(parts)
        assert engine.process.wait(END_S) == 1
        assert psutil.wait_procs([offload], timeout=5)[1] == []


def test_a_killed_offload_process_ends_the_engine(folder):
    """Rows that will never come are a failure in the clients' hands, not a wait."""
    with served(folder, "--ple-backend", "process") as engine:
        (offload,) = engine.children("offload")
        parts = engine.complete("without rows", 4000, stream=True)
        next(iter(parts))
        began = time.monotonic()
        offload.kill()
        with pytest.raises(openai.APIError):
            list(parts)
        assert time.monotonic() - began < 10
        assert engine.process.wait(END_S) == 1


def test_nothing_outlives_a_killed_api(folder):
    """SIGKILL to the process that an operator started: worker and offload process end by themselves."""
    with served(folder, "--ple-backend", "process") as engine:
        below = psutil.Process(engine.process.pid).children(recursive=True)
        engine.process.kill()
        engine.process.wait()
        assert psutil.wait_procs(below, timeout=10)[1] == []


def test_a_step_that_never_ends_is_a_failure_in_time(folder):
    """An output event that never completes: the client has an error that says stalled, and the service ends."""
    env = {"STALLWATCH_TEST_FAULTS": "1", "STALLWATCH_FAULTS": "event.never@output"}
    with served(folder, "--step-timeout", "1.5", env=env) as engine:
        with pytest.raises(openai.APIStatusError) as failed:
            engine.complete("hello", 4)
        assert failed.value.status_code == 503
        assert bodies(failed.value)["kind"] == "DEVICE_WAIT"
        assert engine.process.wait(END_S) == 1


def without(folder, target, *names: str):
    """The same checkpoint, by links, without some of its files."""
    target.mkdir()
    for name in os.listdir(folder):
        if name not in names:
            (target / name).symlink_to(folder / name)
    return target


def refused(folder, *options: str) -> str:
    """The one line that is said by a start that ends with status 2."""
    engine = start(folder, *options, stderr=subprocess.PIPE)
    said = engine.process.communicate(timeout=90)[1]
    assert engine.process.returncode == 2
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith(("ERROR", "Error", "worker: "))]
    return " ".join(lines)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("model.safetensors", None, "model.safetensors: cannot be read"),
        ("model.safetensors", b"\x00" * 64, "model.safetensors: is cut off"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("chat_template.jinja", b"{% if %}", "chat template"),
        ("config.json", None, "config.json: cannot be read"),
        ("config.json", b'{"architectures": ["Llama"]}', "architectures ['Llama']"),
    ],
)
def test_a_wrong_file_is_named_before_there_is_a_worker(  # noqa: PLR0917
    folder, tmp_path, name, content, named
):
    """A file that is missing or wrong: status 2 and its name at once, and no process was started to find it."""
    broken = without(folder, tmp_path / "broken", name)
    if content is not None:
        (broken / name).write_bytes(content)
    code = (
        "import subprocess, sys; subprocess.Popen = None\n"
        "from stallwatch_engine.cli import engine; engine(['serve', *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", str(broken), "--port", str(free_port())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert named in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--device", "cuda"], "device=cuda"),
        (["--ple-backend", "disk"], "needs --ple-folder"),
        (["--page-size", "6"], "page_size"),
    ],
)
def test_options_that_cannot_work_are_said_in_one_sentence(folder, options, named):
    """Whatever they contradict: this host, each other, or the model; before any weight is read."""
    if options == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("this host has a device")
    said = refused(folder, *options)
    assert named in said
    assert "load_weights" not in said


@pytest.mark.parametrize("backend", ["disk", "process"])
def test_another_checkpoints_table_files_are_a_sentence_too(folder, tmp_path, backend):
    """A folder that holds another checkpoint's tables: who opens it refuses, and the start ends with its words."""
    tables = tmp_path / "tables"
    other = tmp_path / "other"
    make_tiny(other, seed=1)
    with served(other, "--ple-backend", "disk", "--ple-folder", str(tables)):
        pass
    options = ["--ple-backend", backend, "--ple-folder", str(tables)]
    engine = start(folder, *options, stderr=subprocess.PIPE)
    said = engine.process.communicate(timeout=90)[1]
    assert engine.process.returncode == (2 if backend == "disk" else 1)
    assert "another checkpoint" in said
    assert "name another folder, or allow it to be replaced" in said
    assert "Traceback" not in said


def test_a_start_for_nothing_ends_soon(folder):
    """A port that is taken: status 2 and a sentence, without waiting for the model. SIGTERM while it loads: at once."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = start(folder, "--port", str(taken.getsockname()[1]), stderr=subprocess.PIPE)
        said = engine.process.communicate(timeout=60)[1]
    assert engine.process.returncode == 2
    assert "in use" in said
    engine = start(folder, stderr=subprocess.PIPE)
    engine.until(lambda: engine.children("worker"), 30)
    (worker,) = engine.children("worker")
    engine.process.terminate()
    engine.process.communicate(timeout=15)
    assert engine.process.returncode != 0
    assert psutil.wait_procs([worker], timeout=5)[1] == []


def test_several_clients_at_once_wait_their_turn(engine):
    """Twelve clients of an engine for four: all are answered, none hangs."""
    done: list[str] = []
    lock = threading.Lock()

    def ask(number: int) -> None:
        found = ids(engine, f"client {number}", 6)
        with lock:
            done.append(found)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 12


def test_models_are_listed(engine):
    """The served name, and nothing of the folder's."""
    assert [model.id for model in engine.client().models.list()] == [MODEL]
