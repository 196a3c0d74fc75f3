"""The phase map's resolver and wrapper installer."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading

import pytest

from stallwatch_engine.phasemap import HERE, Installer, Row, ThreadLanes


class Tape:
    """A lane that remembers what was said to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: list[tuple[str, object]] = []
        self.depth = 0

    def pusher(self, phase, *details, cls="work", limit=None, on=""):
        def push(*values):
            self.depth += 1
            self.said.append(("push", (phase, cls, on, dict(zip(details, values, strict=True)))))

        return push

    def pop(self) -> None:
        self.depth -= 1
        self.said.append(("pop", None))

    @property
    def phases(self) -> list[object]:
        return [what[0] for verb, what in self.said if verb == "push"]


class FakeBoard:
    """A board that hands out tapes."""

    def __init__(self) -> None:
        self.lanes: dict[str, Tape] = {}

    def lane(self, name: str) -> Tape:
        return self.lanes.setdefault(name, Tape(name))


ENGINE = '''
import functools


def helper(x):
    """A plain function."""
    return x + 1


class Base:
    def inherited(self):
        return "base"


class Engine(Base):
    def step(self, batch, *, deep=0):
        """One step."""
        return self.step(batch, deep=deep - 1) if deep else len(batch)

    def fail(self):
        raise KeyError("no")

    @staticmethod
    def fixed(x):
        return x * 2

    @classmethod
    def made(cls):
        return cls.__name__

    async def later(self):
        return 1

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that exists on the path and is not imported."""
    name = "fake_engine_for_phasemap"
    (tmp_path / f"{name}.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def lanes():
    """Lanes of this thread on a fake board."""
    return ThreadLanes(FakeBoard)


@pytest.fixture
def installer(lanes):
    """An installer that is undone whatever the test does."""
    made = Installer(lanes)
    yield made
    made.uninstall()
    assert not [f for f in sys.meta_path if type(f).__module__ == "stallwatch_engine.phasemap"]


def test_a_row_wraps_a_method_and_names_its_phase_while_it_runs(module, installer, lanes):
    """While the method runs its lane is in the phase, with class and details; afterwards it is not."""
    row = Row(
        f"{module}:Engine.step", "main", "step", "wait", on="a:0/b", details=("n=1#", "d=deep")
    )
    imported = importlib.import_module(module)
    installer.install([row])
    assert imported.Engine().step([1, 2, 3]) == 3
    tape = lanes.board.lanes["main"]
    assert tape.said == [("push", ("step", "wait", "a:0/b", {"n": 3, "d": -1})), ("pop", None)]


def test_the_wrapper_keeps_the_metadata_and_the_signature(module, installer):
    """Tools that look at the function see the original."""
    imported = importlib.import_module(module)
    before = inspect.signature(imported.Engine.step)
    installer.install([Row(f"{module}:Engine.step", "main", "step")])
    assert imported.Engine.step.__doc__ == "One step."
    assert imported.Engine.step.__qualname__ == "Engine.step"
    assert inspect.signature(imported.Engine.step) == before


def test_recursion_and_exceptions_leave_the_phase_stack_balanced(module, installer, lanes):
    """However the call ends, every push has its pop."""
    imported = importlib.import_module(module)
    installer.install(
        [Row(f"{module}:Engine.step", "main", "s"), Row(f"{module}:Engine.fail", "main", "f")]
    )
    assert imported.Engine().step([], deep=3) == 0
    with pytest.raises(KeyError):
        imported.Engine().fail()
    tape = lanes.board.lanes["main"]
    assert tape.depth == 0
    assert tape.phases == ["s"] * 4 + ["f"]


def test_static_and_class_methods_and_functions_are_wrapped_as_what_they_are(
    module, installer, lanes
):
    """The kind of the attribute survives, so callers need not know."""
    imported = importlib.import_module(module)
    installer.install(
        [
            Row(f"{module}:Engine.fixed", "main", "static"),
            Row(f"{module}:Engine.made", "main", "class"),
            Row(f"{module}:helper", "main", "function"),
        ]
    )
    engine = imported.Engine()
    assert (engine.fixed(4), imported.Engine.fixed(4)) == (8, 8)
    assert (engine.made(), imported.helper(1)) == ("Engine", 2)
    assert lanes.board.lanes["main"].phases == ["static", "static", "class", "function"]


def test_a_module_that_is_not_imported_is_left_alone_until_it_is(module, installer, lanes):
    """Installing imports nothing; the rows apply when the engine imports the module itself."""
    installer.install([Row(f"{module}:helper", "main", "helper")])
    assert module not in sys.modules
    assert list(installer.waiting) == [module]
    imported = importlib.import_module(module)
    assert imported.helper(1) == 2
    assert lanes.board.lanes["main"].phases == ["helper"]
    assert not installer.waiting
    assert imported.__spec__.loader.get_source(module) == ENGINE


def test_what_does_not_resolve_is_reported_and_never_raised(module, installer):
    """An engine of another version gets the rows it has; the rest is said by name and reason."""
    importlib.import_module(module)
    installer.install(
        [
            Row(f"{module}:Engine.gone", "main", "x", forward=""),
            Row(f"{module}:Missing.step", "main", "x", since="9.9"),
            Row(f"{module}:Engine.later", "main", "x"),
            Row(f"{module}:functools", "main", "x"),
            Row(f"{module}:helper", "main", "ok"),
        ]
    )
    assert installer.wrapped == [f"{module}:helper"]
    assert "9.9" in installer.missing[f"{module}:Missing.step"]
    assert "await" in installer.missing[f"{module}:Engine.later"]
    assert set(installer.missing) == {
        f"{module}:Engine.gone",
        f"{module}:Missing.step",
        f"{module}:Engine.later",
        f"{module}:functools",
    }


def test_installing_twice_wraps_once_and_uninstalling_restores(module, installer, lanes):
    """A plugin may be loaded again; an engine must not pay twice."""
    imported = importlib.import_module(module)
    original = imported.Engine.step
    row = Row(f"{module}:Engine.step", "main", "step")
    installer.install([row])
    installer.install([row])
    imported.Engine().step([])
    assert lanes.board.lanes["main"].phases == ["step"]
    installer.uninstall()
    assert imported.Engine.step is original


def test_an_inherited_method_is_wrapped_on_the_named_class_only(module, installer, lanes):
    """The base class, and so its other children, stay as they are."""
    imported = importlib.import_module(module)
    installer.install([Row(f"{module}:Engine.inherited", "main", "own")])
    assert imported.Base().inherited() == imported.Engine().inherited() == "base"
    assert lanes.board.lanes["main"].phases == ["own"]
    installer.uninstall()
    assert "inherited" not in vars(imported.Engine)


def test_a_method_behind_getattr_can_be_marked_without_importing_its_class(
    module, installer, lanes
):
    """`forward` defines the method on the forwarding class, where it beats __getattr__."""
    imported = importlib.import_module(module)
    installer.install([Row(f"{module}:Engine.load", "main", "load", "start", forward="inner")])

    class Inner:
        def load(self, path):
            return f"loaded {path}"

    engine = imported.Engine()
    engine.inner = Inner()
    assert engine.load("x") == "loaded x"
    assert lanes.board.lanes["main"].phases == ["load"]


def test_a_lane_has_one_writer(module, installer, lanes):
    """A second thread that runs the same function does not write the first one's lane."""
    imported = importlib.import_module(module)
    installer.install(
        [Row(f"{module}:helper", "main", "helper"), Row(f"{module}:Engine.made", HERE, "here")]
    )
    imported.helper(1)
    other = threading.Thread(target=lambda: (imported.helper(1), imported.Engine.made()))
    other.start()
    other.join(5)
    assert lanes.board.lanes["main"].phases == ["helper"]
    imported.Engine.made()
    assert lanes.board.lanes["main"].phases == ["helper", "here"]


def test_an_import_that_fails_stays_a_plain_import_error(module, installer, tmp_path):
    """Our hook changes neither the error of a broken module nor a later, good import of it."""
    broken = tmp_path / "fake_broken_engine.py"
    broken.write_text("raise RuntimeError('broken')\n")
    installer.install(
        [Row("fake_broken_engine:helper", "main", "x"), Row("no_such_engine:f", "main", "x")]
    )
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module("fake_broken_engine")
    with pytest.raises(ModuleNotFoundError, match="no_such_engine"):
        importlib.import_module("no_such_engine")
    broken.write_text("def helper():\n    return 'mended'\n")
    importlib.invalidate_caches()
    try:
        assert importlib.import_module("fake_broken_engine").helper() == "mended"
        assert "fake_broken_engine:helper" in installer.wrapped
    finally:
        sys.modules.pop("fake_broken_engine", None)


@pytest.mark.parametrize(
    "row",
    [
        {"target": "no_colon"},
        {"target": "m:"},
        {"cls": "busy"},
        {"limit_s": -1.0},
        {"limit_s": float("nan")},
        {"limit_s": float("inf")},
        {"details": ("a=0", "b=1", "c=2")},
    ],
)
def test_a_row_that_cannot_be_meant_is_refused(row):
    """A typing mistake in a map is found where it is made."""
    fields = {"target": "m:f", "lane": "main", "phase": "p", **row}
    with pytest.raises(ValueError, match="phase map"):
        Row(**fields)
