"""The plugin's entry: roles, inertness, forks, and a user's own map."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stallwatch.board.create import BoardFolder
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch_engine import phasemap
from stallwatch_engine.vllm_plugin import api, omni_map, roles, usermap, vllm_map, vllm_wraps


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("EngineCore", ("core", 0)),
        ("EngineCore_DP3", ("core", 3)),
        ("VllmWorker-1", ("worker", 1)),
        ("ApiServer_2", ("api", 2)),
        ("MainProcess", None),
        ("EngineCoreish", None),
    ],
)
def test_the_role_is_read_from_the_name_that_vllm_gave(monkeypatch, name, role):
    """A process that is not named may still become the API server, but is none yet."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    assert roles.of_process() == role


def test_workers_of_two_data_parallel_engines_never_share_a_rank(monkeypatch):
    """Each engine numbers its workers from 0; on the board a rank names one process."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "VllmWorker-1")
    parent = type("Parent", (), {"name": "EngineCore_DP2"})()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    assert roles.of_process() == ("worker", 2001)


def test_the_maps_name_each_function_once():
    """Two rows for one function would wrap it twice."""
    targets = [row.target for row in (*vllm_map.CORE_ROWS, *vllm_map.WORKER_ROWS, *omni_map.rows())]
    assert len(targets) == len(set(targets))


def test_the_code2wav_map_carries_the_phases_that_were_asked_for():
    """Setup, encoder, flow-matching mode, cache materialisation, vocoder and output copy are told apart."""
    phases = {row.phase for row in omni_map.rows()}
    assert {
        "setup",
        "encoder",
        "cfm",
        "cfm_graph",
        "cache_materialise",
        "hift",
        "output_copy",
    } <= phases


USER_TOML = """
[[phase]]
target = "my.engine:Runner.decode"
phase = "decode"
class = "wait"
on = "worker:0/main"
limit = 30
details = ["tokens=1.num_tokens"]
"""


def test_a_users_map_is_read_from_toml_and_from_a_literal():
    """Both forms say the same."""
    row = usermap.parse(USER_TOML, toml=True)[0]
    literal = (
        "{'phase': [{'target': 'my.engine:Runner.decode', 'phase': 'decode', 'class': 'wait',"
        " 'on': 'worker:0/main', 'limit': 30, 'details': ['tokens=1.num_tokens']}]}"
    )
    assert usermap.parse(literal, toml=False) == [row]
    assert (row.lane, row.cls, row.limit_s) == ("main", "wait", 30.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("phase = 3", "list of"),
        ("[[phase]]\ntarget = 'a:b'", "'phase' is missing"),
        ("[[phase]]\ntarget = 'a:b'\nphase = 'x'\nlimits = 3", "unknown key 'limits'"),
        ("[[phase]]\ntarget = 'ab'\nphase = 'x'", "phase 1: .*'ab'"),
        ("[[phase]]\ntarget = 'a:b'\nphase = 'x'\nlimit = nan", "phase 1: "),
    ],
)
def test_a_wrong_map_is_refused_with_its_row_and_key(text, says):
    """The person who wrote the map finds the place."""
    with pytest.raises(ValueError, match=says):
        usermap.parse(text, toml=True)


def test_a_map_that_cannot_be_used_never_stops_an_engine(tmp_path, monkeypatch, caplog):
    """A broken file is a log line; the engine starts with the built-in map."""
    path = tmp_path / "map.toml"
    path.write_text("not = [toml")
    monkeypatch.setenv("MAP", str(path))
    assert usermap.from_environment("MAP") == []
    assert str(path) in caplog.text
    monkeypatch.setenv("MAP", str(tmp_path / "gone"))
    assert usermap.from_environment("MAP") == []


@pytest.fixture
def board():
    """A real board in shared memory."""
    made = BoardFolder.create(Path("/dev/shm"), engine="plugin", incarnation=1)
    yield made
    made.remove()


def run(code: str, board: BoardFolder | None, *arguments: str) -> str:
    environment = {**os.environ, **(board.environment() if board else {})}
    if board is None:
        environment.pop("STALLWATCH_BOARD", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def look(board: BoardFolder):
    reader = BoardReader(board.path)
    try:
        image = reader.look(SystemClock())
        assert image is not None
        return image
    finally:
        reader.close()


NAMED = "import multiprocessing, sys\nmultiprocessing.current_process().name = sys.argv[1]\n"
REGISTER = "from stallwatch_engine import vllm_plugin\nvllm_plugin.register()\n"


@pytest.mark.slow
def test_a_core_is_on_the_board_as_soon_as_plugins_load(board):
    """Loading is the longest start-up phase: the lane must exist before it."""
    read = "import sys\nsys.stdout.write('attached\\n'); sys.stdout.flush(); sys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", NAMED + REGISTER + read, "EngineCore_DP1"],
        env={**os.environ, **board.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == "attached\n"
        image = look(board)
        lane = image.lane("core:1/main")
        assert lane.phase.name == "init"
        assert lane.phase.cls.name == "START"
        assert [p.ready for p in image.processes] == [False]
        child.stdin.close()
        assert child.wait(10) == 0


@pytest.mark.slow
def test_a_main_process_that_serves_nothing_claims_no_lane(board):
    """`vllm --help` and `vllm bench` load plugins too; a lane of theirs would look like an API server."""
    run(NAMED + REGISTER, board, "MainProcess")
    assert look(board).processes == ()
    assert list((board.path / "claims").iterdir()) == []


@pytest.mark.slow
def test_the_model_inspect_helper_stays_off_the_board(board):
    """It lives for seconds and serves nothing."""
    code = NAMED + "sys.argv[0] = '/x/vllm/model_executor/models/registry.py'\n" + REGISTER
    run(code + "sys.stdout.write(str(vllm_plugin._installer))", board, "MainProcess")
    assert look(board).processes == ()


@pytest.mark.slow
def test_nothing_escapes_register(board):
    """vLLM does not guard plugins: an exception of ours would be the death of the engine."""
    code = NAMED + (
        "from stallwatch_engine import vllm_plugin\n"
        "vllm_plugin._rows = lambda lanes: 1 / 0\n"
        "vllm_plugin.register()\n"
        "sys.stdout.write('alive')"
    )
    assert run(code, board, "EngineCore") == "alive"


@pytest.mark.slow
def test_a_forked_child_gets_its_own_slot_under_its_own_name(board):
    """register() does not run in forked children, and at the fork the name is still the parent's."""
    code = (
        NAMED
        + REGISTER
        + (
            "import os\n"
            "from stallwatch_engine.phasemap import Row, bound\n"
            "lanes = vllm_plugin._installer._lanes\n"
            "marks = bound(lanes, 'main', lambda lane: lane.marker('step'))\n"
            "marks()()\n"
            "r, w = os.pipe()\n"
            "pid = os.fork()\n"
            "if not pid:\n"
            "    multiprocessing.current_process().name = 'VllmWorker-1'\n"
            "    marks()()\n"
            "    lanes.get('main').enter('child')\n"
            "    os.write(w, b'x')\n"
            "    sys.stdin.read()\n"
            "    os._exit(0)\n"
            "os.close(w)\n"
            "assert os.read(r, 1) == b'x'\n"
            "sys.stdout.write('forked\\n'); sys.stdout.flush(); sys.stdin.read()\n"
            "os.waitpid(pid, 0)\n"
        )
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "EngineCore"],
        env={**os.environ, **board.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == "forked\n"
        image = look(board)
        assert {p.address: p.pid == child.pid for p in image.processes} == {
            "core:0": True,
            "worker:1": False,
        }
        assert image.lane("worker:1/main").phase.name == "child"
        assert image.lane("core:0/main").phase.name == "step"
        child.stdin.close()
        assert child.wait(10) == 0


def test_a_paused_scheduler_holds_one_lease_until_it_resumes():
    """Requests kept through a weight update move nothing and are no stall while the lease lasts."""
    state = enum.Enum("state", "UNPAUSED PAUSED_NEW PAUSED_ALL")
    said: list[object] = []

    class Board:
        @contextlib.contextmanager
        def pause(self, name, *, seconds, owner):
            said.append((name, seconds, owner))
            yield
            said.append("resumed")

    class Lanes:
        board = Board()

        def get(self, name):
            return name

    pause = vllm_wraps.pause_state(lambda _self, wanted: wanted, Lanes())
    for wanted in (state.PAUSED_NEW, state.PAUSED_ALL, state.UNPAUSED, state.UNPAUSED):
        assert pause(None, wanted) is wanted
    assert said == [("scheduler_paused", 3600.0, "vllm"), "resumed"]


def test_a_rank_whose_step_raised_is_idle_under_another_name_and_did_no_work():
    """vLLM tells nobody about an error on a rank that does not answer: the board does."""
    said: list[object] = []

    class Lane:
        def marker(self, phase, *details, cls="work", on=""):
            return lambda *values: said.append((phase, *values))

        def idle_marker(self, on=""):
            return lambda: said.append("idle")

        def progress(self, count):
            said.append(("work", count))

        def enter(self, phase, *, cls, on, text):
            said.append((phase, cls, text))

    class Lanes:
        failed = ""
        lane = Lane()

        def get(self, name):
            return self.lane

    lanes = Lanes()

    def model(fail):
        if fail:
            raise MemoryError("the prompt was ...")

    step = vllm_wraps.note_error(model, lanes)

    def execute(_self, request):
        with contextlib.suppress(MemoryError):  # as WorkerProc does
            step(request[1])

    rpc = vllm_wraps.worker_rpc(execute, lanes)
    rpc(None, ("execute_model", False))
    rpc(None, ("execute_model", True))
    rpc(None, ("execute_model", False))
    assert said == [
        *(("execute_model", 1), ("work", 1), "idle"),
        *(("execute_model", 2), ("rpc_failed", "idle", "MemoryError")),
        *(("execute_model", 3), ("work", 1), "idle"),
    ]


def test_the_lane_of_the_loop_belongs_to_the_thread_that_runs_it():
    """An AsyncLLM that one thread builds and another one serves: the loop's thread gets the lane."""
    said: list[tuple[str, int]] = []

    class Lane:
        def __init__(self, name):
            self.name = name

        def enter(self, phase, **_):
            said.append((phase, threading.get_ident()))

        def close(self):
            said.append(("closed", threading.get_ident()))

    class Board:
        lane = staticmethod(Lane)

    lanes = phasemap.ThreadLanes(Board)
    lanes.become_api = lambda: None
    (row, *_) = api.rows(lambda: None)
    init = row.wrap(lambda _self: None, lanes)

    init(None)
    here = threading.get_ident()
    assert said == [("wait_engine", here), ("closed", here)]

    def serve():
        lanes.get("loop").enter("loop")

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(5)
    assert said[-1][0] == "loop"
    assert said[-1][1] != here

    async def build_and_serve():
        init(None)
        lanes.get("loop").enter("loop")

    said.clear()
    lanes.forget()
    asyncio.run(build_and_serve())
    assert said == [("wait_engine", here), ("loop", here)]
