"""`stallwatch bench` as a process against a server in another: exit codes, output, Ctrl-C, the progress bar."""

from __future__ import annotations

import csv
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from stallwatch_engine.bench.cli import bench

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "stallwatch_engine.bench.cli"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "engine"), "PYTHONWARNINGS": "error"}
BOUND_S = 40.0  # of a command, interpreter's start included

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def server():
    """The base URL of a scripted server in a process of its own."""
    script = ROOT / "tests" / "bench_server.py"
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV
    ) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
        process.wait(BOUND_S)


@pytest.fixture
def prompts(tmp_path):
    """Writes prompts with their times into a file and returns its path."""

    def write(*items):
        path = tmp_path / "prompts.jsonl"
        lines = [item if isinstance(item, dict) else {"prompt": item} for item in items]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


def command(server, *args, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--url", server, *args],
        capture_output=True, text=True, timeout=BOUND_S, env=ENV, check=False, **options,
    )  # fmt: skip


def seen(server) -> list[str]:
    with urllib.request.urlopen(f"{server}/seen", timeout=10) as answer:
        return json.loads(answer.read())


def test_a_good_run(server, prompts, tmp_path):
    """Exit 0, a table on stdout, nothing on stderr, and files that hold the same run."""
    path = prompts("ok a", {"prompt": "ok b", "expect": "two"})
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    gates = ["--gate", "ttft_p99=30s", "--gate", "tokens_per_s=0.001", "--gate", "accuracy=1"]
    done = command(server, "--prompts", path, *files, *gates)

    assert (done.returncode, done.stderr) == (0, "")
    assert "2 of 2 requests completed" in done.stdout
    assert done.stdout.count("passed") == 3
    value = json.loads((tmp_path / "r.json").read_text())
    assert value["exit_code"] == 0
    assert value["counts"]["completed"] == 2
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [row["text_sha256"] for row in rows] == [
        each["text_sha256"] for each in value["requests"]
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "r.csv", "r.json"]


def test_a_failed_gate(server, prompts):
    """Exit 3, with the gate and its figure named last."""
    done = command(server, "--prompts", prompts("ok"), "--gate", "ttft_p50=1us")
    assert done.returncode == 3
    assert "gate ttft_p50" in done.stdout.splitlines()[-1]
    assert "FAILED" in done.stdout.splitlines()[-1]


def test_the_breaker_in_a_trace_with_times(server, prompts):
    """Exit 124 long before the trace's end; the server, another process, counts no later request."""
    trace = [{"prompt": f"ok traced {n}", "at": n / 10} for n in range(300)]
    trace[3]["prompt"] = "never traced 3"
    began = time.monotonic()
    flags = ["--fail-fast-on-timeout", "--read-timeout", "2s", "-o", "json"]
    done = command(server, "--trace", prompts(*trace), *flags, "--gate", "tokens_per_s=0")

    assert done.returncode == 124, done.stderr
    assert time.monotonic() - began < 25
    value = json.loads(done.stdout)
    assert [each["index"] for each in value["requests"]] == list(range(300))
    assert value["breaker"]["request"] == 3
    assert value["counts"]["timed_out"] == 1
    assert value["counts"]["cancelled"] == 300 - 1 - value["counts"]["completed"]
    assert value["gates"][0]["passed"] is False
    sent = [each["index"] for each in value["requests"] if each["sent_s"] is not None]
    came = [text for text in seen(server) if "traced" in text]
    assert came == [trace[n]["prompt"] for n in sent][: len(came)]
    assert len(came) >= 4


def test_ctrl_c_gives_the_partial_result(server, prompts):
    """SIGINT ends a run that would last ten minutes: partial JSON on stdout, exit 130."""
    path = prompts("ok first", *["never interrupted"] * 5)
    with subprocess.Popen(
        [*COMMAND, "--url", server, "--prompts", path, "-o", "json", "-c", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + BOUND_S
        while seen(server).count("never interrupted") < 3:
            assert time.monotonic() < deadline, "its requests never came"
            time.sleep(0.02)  # a poll with a deadline
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=BOUND_S)
    assert (process.returncode, err) == (130, "")
    ends = [each["outcome"] for each in json.loads(out)["requests"]]
    assert ends == ["completed", *["cancelled"] * 5]


def test_a_bar_is_drawn_on_a_terminal_only(server, prompts):
    """On a terminal stderr shows the requests that are done; stdout stays clean JSON."""
    near, far = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "--url", server, "--prompts", prompts("ok", "ok slow 0.3"), "-o", "json"],
        stdout=subprocess.PIPE, stderr=far, env={**ENV, "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(far)
        drawn = b""
        deadline = time.monotonic() + BOUND_S
        while select.select([near], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                drawn += os.read(near, 65536)
            except OSError:  # the other end is closed
                break
        out = process.stdout.read()
        assert process.wait(BOUND_S) == 0
    os.close(near)
    assert b"2/2" in drawn
    assert json.loads(out)["counts"]["completed"] == 2


def test_no_server_is_one_sentence(prompts):
    """Exit 1, the address that did not answer and what the system said of it, no traceback."""
    done = command("http://127.0.0.1:9", "--prompts", prompts("ok"))
    assert done.returncode == 1
    assert "http://127.0.0.1:9/v1/models: Connection refused\n" in done.stderr
    assert "Traceback" not in done.stderr
    given = command("http://127.0.0.1:9", "--prompts", prompts("ok"), "--model", "m")
    assert given.returncode == 1
    assert "1 x connection: Connection refused\n" in given.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gate", "tftf_p99=1s"], "no figure"),
        (["--request-rate", "nan"], "request rate"),
        (["--request-rate", "1", "--trace", "FILE"], "leave --request-rate out"),
        (["--time-scale", "2"], "--trace"),
        (["--trace", "FILE"], "request 0 of the trace"),
        (["--prompts", "FILE", "--sharegpt", "FILE"], "give one of them"),
        (["--prompts", "FILE", "--vocab-size", "9"], "random prompts"),
        (["--vocab-size", "9", "--endpoint", "chat", "--model", "m"], "token ids"),
        (["--timeout", "0"], "no duration"),
        (["--temperature", "nan"], "extra fields"),
        (["--extra-body", "[]"], "no JSON object"),
        (["--api-key-env", "STALLWATCH_NO_SUCH"], "is not set"),
        (["--json", "/nowhere/r.json"], "cannot write"),
        (["--url", "ftp://x"], "url"),
        (["--url", "http://me:word@127.0.0.1:1"], "holds a user"),
        (["--concurrency", "9999999"], "concurrency"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(args, said, prompts):
    """Exit 2 with the flag or figure at fault, before anything is sent."""
    path = prompts("ok")
    done = CliRunner().invoke(bench, [path if arg == "FILE" else arg for arg in args])
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_help_loads_no_http_client():
    """`--help` stays quick: neither aiohttp, rich nor torch is imported by the command's module."""
    code = (
        "import sys, stallwatch_engine.bench.cli\n"
        "bad = {'aiohttp', 'rich', 'torch', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, timeout=BOUND_S, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
