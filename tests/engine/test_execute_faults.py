"""Faults of offload process, inputs and events in the middle of a serving engine: right tokens, or an error in time."""

from __future__ import annotations

import os
import time

import pytest
import torch

from engine_rig import rig
from engine_soak import soak
from stallwatch_engine.checkpoint.tiny import make_tiny
from stallwatch_engine.faults import SWITCH, VARIABLE, Faults
from stallwatch_engine.ple.offload import process

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(300)]
PROMPTS = {0: [1, 2, 3], 1: list(range(40)), 2: [257, 5, 257, 6]}
LIMIT_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path / "tiny")
    return path / "tiny"


@pytest.fixture(scope="module")
def right(folder):
    """What the prompts give without any fault."""
    with rig(folder) as engine:
        return {name: engine.alone(prompt, 20)[0] for name, prompt in PROMPTS.items()}


def served(engine) -> dict:
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, 20)
    engine.drain()
    return engine.tokens


@pytest.fixture
def faulty(monkeypatch):
    """The faults for this process, and in the environment for the offload process."""

    def set_to(text: str) -> Faults:
        monkeypatch.setenv(SWITCH, "1")
        monkeypatch.setenv(VARIABLE, text)
        monkeypatch.setattr(process, "STEP_S", 1.0)  # its own tests wait the whole five
        return Faults.from_environment()

    return set_to


@pytest.mark.parametrize(
    "fault", ["offload.slow@9=300", "event.late@inputs=5", "event.late@output=5"]
)
def test_late_is_not_wrong(folder, right, faulty, fault):
    """Rows, inputs or outputs that come late change nothing."""
    with rig(folder, ple_backend="process", faults=faulty(fault)) as engine:
        assert served(engine) == right


@pytest.mark.parametrize(
    "fault",
    [
        "offload.kill@9",
        "offload.kill_before_ready@9",
        "offload.stop@9",
        "offload.duplicate@9",
        "offload.out_of_order@9",
        "offload.double_request@9",
        "event.never@inputs",
        "event.never@output",
    ],
)
def test_what_cannot_be_right_is_an_error_in_time(folder, right, faulty, fault):
    """Each ends in an exception within its bound; every token until then is the right one."""
    with rig(folder, ple_backend="process", step_timeout=LIMIT_S, faults=faulty(fault)) as engine:
        began = time.monotonic()
        with pytest.raises(Exception) as failed:
            served(engine)
        assert not isinstance(failed.value, AssertionError)
        assert time.monotonic() - began < 4 * LIMIT_S
        for name, tokens in engine.tokens.items():
            assert tokens == right[name][: len(tokens)]


def test_an_event_that_lies_is_found_out_or_harmless(folder, right, faulty):
    """Inputs said to be copied before they are: the stamp tells, or the copy was there in time."""
    with rig(folder, step_timeout=LIMIT_S, faults=faulty("event.wrong@inputs")) as engine:
        try:
            tokens = served(engine)
        except Exception as error:
            assert "inputs of step" in str(error)  # noqa: PT017
            tokens = engine.tokens
        for name, found in tokens.items():
            assert found == right[name][: len(found)]


def test_one_event_for_all_inputs_stalls_inside_its_bound(folder, faulty):
    """The old mode in the whole engine: the host runs a step ahead, and nothing moves until the bound."""
    with rig(
        folder, ple_backend="process", step_timeout=1.0, faults=faulty("inputs.shared_event")
    ) as engine:
        engine.add(0, PROMPTS[0], 20)
        with pytest.raises(Exception, match=r"(inputs|output) of step \d+ to the host did not"):
            engine.drain()
        assert len(engine.tokens.get(0, [])) < 20


def test_a_table_file_cut_short_is_an_error(folder, right, tmp_path):
    """Disk tables truncated while they are served: named, not SIGBUS, and no token after it."""
    with rig(folder, ple_backend="disk", ple_folder=str(tmp_path / "tables")) as engine:
        assert served(engine) == right
        for path in (tmp_path / "tables").rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 16:
                os.truncate(path, 4096)
        with pytest.raises(Exception, match=r"ends at byte|cut|truncated|short|changed"):
            engine.alone([9, 8, 7], 30)


def test_preempted_requests_give_the_same_tokens(folder):
    """Pages for two thirds of what is asked: younger requests begin again from position 0, and say the same."""
    asked = {name: [name + 1, 3, 5 * name] for name in range(3)}
    with rig(folder, max_num_seqs=3, max_model_len=64, kv_tokens=96) as engine:
        for name, prompt in asked.items():
            engine.add(name, prompt, 42)
        engine.drain()
        assert engine.scheduler.load.preemptions > 0
        for name, prompt in asked.items():
            tokens, logits = engine.alone(prompt, 42)
            assert engine.tokens[name] == tokens
            assert torch.equal(torch.stack(engine.logits[name]), logits)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["resident", "process"])
def test_thousands_of_steps_leave_nothing(folder, backend):
    """After a warm-up memory does not grow, and descriptors, threads, shared files, slots and pages are those
    from before, with one request in twenty aborted. `make soak-engine` does ten thousand steps of it."""
    steps = int(os.environ.get("STALLWATCH_SOAK_STEPS", "1000"))
    with rig(folder, max_num_seqs=4, max_model_len=96, ple_backend=backend) as engine:
        found = soak(engine, warm_up=300, steps=steps)
        assert found.differences() == []
        assert found.aborted > 0
        # one megabyte a thousand steps, and what an allocator may keep of one step
        assert found.slope * steps / 1000 <= steps / 1000 + 2
        assert found.before.free_slots == engine.built.limits.slots
        assert found.before.free_pages == engine.built.limits.pages


def test_a_small_leak_is_seen(folder):
    """The same soak of an engine that keeps 4 KiB a step and a descriptor every 400: neither passes."""
    kept: list[bytes] = []
    fds: list[int] = []
    with rig(folder, max_num_seqs=4, max_model_len=96) as engine:
        original = engine.executor.launch

        def leaking(plan) -> None:
            kept.append(os.urandom(4096))
            if plan.step % 400 == 399:
                fds.append(os.open(os.devnull, os.O_RDONLY))
            original(plan)

        engine.executor.launch = leaking
        found = soak(engine, warm_up=100, steps=500)
    for fd in fds:
        os.close(fd)
    assert found.slope > 2
    assert [line.split(":")[0] for line in found.differences()] == ["descriptors"]
