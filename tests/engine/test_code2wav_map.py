"""The Code2Wav phase map: its names, its switch, and the behaviour of its steps."""

from __future__ import annotations

import ast
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import code2wav_standin as standin
from stallwatch_engine.phasemap import Installer, ThreadLanes
from stallwatch_engine.vllm_plugin import omni_map
from stallwatch_engine.vllm_plugin.code2wav import Size

NAMES = Path(__file__).with_name("code2wav_names.json")
WHEEL = "STALLWATCH_OMNI_WHEEL"


class Tape:
    """A lane that remembers its frames, as the heartbeat's does: push, enter in place, pop."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, dict[str, int]]] = [("idle", {})]
        self.seen: list[tuple[str, dict[str, int]]] = []
        self.limits: dict[str, float | None] = {}
        self.classes: dict[str, str] = {}

    def _put(self, phase: str, details, *, deeper: bool, cls: str, limit: float | None):
        self.limits[phase], self.classes[phase] = limit, cls

        def mark(*values: int) -> None:
            if not deeper:
                self.frames.pop()
            self.frames.append((phase, dict(zip(details, values, strict=True))))
            self.seen.append(self.frames[-1])
            assert len(self.frames) <= 2, "steps replace each other; they do not nest"

        return mark

    def pusher(self, phase, *details, cls="work", limit=None, on=""):
        return self._put(phase, details, deeper=True, cls=cls, limit=limit)

    def marker(self, phase, *details, cls="work", limit=None, on=""):
        return self._put(phase, details, deeper=False, cls=cls, limit=limit)

    def pop(self) -> None:
        self.frames.pop()


@pytest.fixture
def tape() -> Iterator[Tape]:
    """The stand-in wrapped by the map with 30 s a step, and this thread's lane."""
    found = Tape()
    lanes = ThreadLanes(type("Board", (), {"lane": lambda _, __: found}))
    standin.publish()
    installer = Installer(lanes, mark="__test_code2wav__")
    installer.install(omni_map.rows(30.0))
    assert installer.missing == {}
    assert installer.waiting == {}
    lanes.get("main")
    yield found
    installer.uninstall()


def decoded(*, ragged: bool = False, eager: bool = False) -> torch.Tensor:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    runner = standin.GPUGenerationModelRunner()
    runner.model.backend._cfm_graph_wrapper.eager = eager
    runner.execute_model(torch.arange(12).reshape(2, 6), ragged=ragged)
    return runner.sample_tokens()


def test_every_name_of_the_map_is_in_the_published_wheel():
    """The committed list of qualified names of that wheel holds all that the map wraps."""
    known = json.loads(NAMES.read_text())
    assert known["version"]
    missing = {row.target for row in omni_map.rows()} - set(known["names"])
    assert not missing


def test_the_committed_names_are_those_of_the_wheel():
    """Read with ast from the wheel itself, nothing of it imported."""
    path = os.environ.get(WHEEL, "")
    if not path:
        pytest.skip(f"{WHEEL} names no wheel: pip download vllm-omni --no-deps")
    known = json.loads(NAMES.read_text())
    assert f"-{known['version']}-" in Path(path).name
    with zipfile.ZipFile(path) as wheel:
        for name in known["names"]:
            module, _, qualified = name.partition(":")
            tree = ast.parse(wheel.read(module.replace(".", "/") + ".py"))
            owner, method = qualified.split(".")
            (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner)
            methods = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == method]
            assert methods, name


@pytest.mark.parametrize("value", ["", "0", "off", "OFF", "no", "-1", "nan", "inf", "1e999"])
def test_it_is_off_unless_switched_on(value):
    """Nothing set, switched off, or no usable number of seconds: not one function is wrapped."""
    assert omni_map.from_environment({omni_map.VARIABLE: value}) == []
    assert omni_map.from_environment({}) == []


@pytest.mark.parametrize(("value", "limit"), [("60", 60.0), ("2.5s", 2.5), ("on", None)])
def test_a_number_is_the_limit_of_every_step(tape, value, limit):
    """Seconds become each step's own limit; `on` leaves limits to the supervisor."""
    rows = omni_map.from_environment({omni_map.VARIABLE: value})
    assert len(rows) == len(omni_map.rows())
    lanes = ThreadLanes(type("Board", (), {"lane": lambda _, __: tape}))
    lanes.get("main")
    row = next(row for row in rows if row.phase == "encoder")
    assert row.wrap is not None
    row.wrap(lambda _self, tokens: tokens, lanes)(None, torch.zeros(2, 6))
    assert tape.limits["encoder"] == limit


def test_steps_come_in_order_and_replace_each_other(tape):
    """One chunk: setup, encoder, flow matching, caches, vocoder, output copy; two frames at most."""
    decoded()
    names = [name for name, _ in tape.seen]
    order = [
        "setup_prompt",
        "setup",
        "cache_stack",
        "encoder",
        "cfm",
        "cfm_graph",
        "cache_materialise",
        "hift",
        "hift_graph",
        "output_copy",
    ]
    assert [names.index(n) for n in order] == sorted(names.index(n) for n in order)
    assert tape.frames == [("idle", {})]
    assert {tape.classes[n] for n in ("cfm_capture", "hift_capture")} == {"start"}


def test_details_are_those_of_the_step_alone(tape):
    """Each step says its own sizes; none is left over from the step before, and after it the outer's return."""
    decoded()
    seen = tape.seen
    assert ("setup", {"batch": 2}) in seen
    assert ("encoder", {"batch": 2, "frames": 6}) in seen
    assert ("cfm", {"batch": 2, "frames": 6}) in seen
    assert ("hift", {"batch": 2, "frames": 6}) in seen
    assert ("code2wav", {}) in seen
    after = seen[seen.index(("encoder", {"batch": 2, "frames": 6})) + 1]
    assert after == ("code2wav", {})


def test_modes_of_the_flow_matching_are_told_apart(tape):
    """Graph, eager, ragged: which of them runs is the phase's name."""
    decoded()
    assert {"cfm_graph", "cfm_capture"} <= {n for n, _ in tape.seen}
    tape.seen.clear()
    decoded(eager=True)
    names = {n for n, _ in tape.seen}
    assert "cfm_eager" in names
    assert "cfm_capture" not in names
    tape.seen.clear()
    decoded(ragged=True)
    names = {n for n, _ in tape.seen}
    assert "cfm_ragged" in names
    assert "cfm_graph" not in names


def test_marking_changes_no_result(tape):
    """The decoded sound with marks is bitwise the one without."""
    marked = decoded()
    with pytest.MonkeyPatch.context() as patch:
        for cls in (standin.BatchedToken2Wav, standin.GPUGenerationModelRunner):
            for name in dir(cls):
                inner = getattr(getattr(cls, name), "__wrapped__", None)
                if inner is not None:
                    patch.setattr(cls, name, inner)
        plain = decoded()
    assert torch.equal(marked, plain)


def test_an_error_leaves_the_lane_where_it_was(tape):
    """A step that raises ends its phase and those around it."""
    runner = standin.GPUGenerationModelRunner()
    with pytest.raises(IndexError):
        runner.execute_model(torch.full((2, 6), 64))
    assert tape.frames == [("idle", {})]


def test_a_missing_argument_is_no_error():
    """Another version that calls it otherwise: -1, never an exception."""
    size = Size("batch", 1, "tokens", 0)
    assert size.read((None,), {}) == -1
    assert size.read((None, "no tensor"), {}) == -1
    assert size.read((None,), {"tokens": torch.zeros(3, 1)}) == 3
    assert Size("batch", 1, "states").read((None, [1, 2]), {}) == 2
