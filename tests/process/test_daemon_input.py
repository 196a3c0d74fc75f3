"""What an operator can get wrong: one clear sentence, the documented exit code, nothing left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import ENGINES, Daemon, daemon, free_port, place, tag, toml

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def sentence(run: Daemon) -> str:
    """The line that says what is wrong; a traceback is none."""
    text = run.log()
    assert "Traceback" not in text, text
    assert "internal error" not in text, text
    return text


ENGINE = {"command": ["true"]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"engines": {"a": {**ENGINE, "comand": ["x"]}}}, ("comand", "did you mean 'command'")),
        ({"engines": {"a": {**ENGINE, "limits": {"default": "soon"}}}}, ("soon", "'60s'")),
        ({"engines": {"a": {**ENGINE, "limits": {"default": "nan"}}}}, ("nan", "finite")),
        ({"engines": {"a": {**ENGINE, "limits": {"default": 5}}}}, ("no unit", "'60s'")),
        (
            {"engines": {"a": {**ENGINE, "port": 7001}, "b": {**ENGINE, "port": 7001}}},
            ("both use port 7001", "its own port"),
        ),
        ({"engines": {}}, ("no engine", "[engines.NAME]")),
        ({"supervisor": {"control": "0.0.0.0:9470"}, "engines": {"a": ENGINE}}, ("token",)),
    ],
    ids=[
        "unknown-key",
        "duration",
        "nan",
        "no-unit",
        "one-port-twice",
        "no-engine",
        "open-control",
    ],
)
def test_a_configuration_that_cannot_be_meant_ends_with_78_and_names_the_mend(
    folder, config, words
):
    """Whatever is wrong in the file is said in words with its mend, and nothing is started."""
    config.setdefault("supervisor", {}).setdefault("state_dir", str(folder / "state"))
    with daemon(folder, text=toml(config)) as run:
        assert run.wait_exit() == 78
        for word in words:
            assert word in sentence(run)


def test_a_missing_file_ends_with_78_and_its_name(folder):
    """A path that is not there is said with the path."""
    with daemon(folder, argv=["-c", str(folder / "nothing.toml")]) as run:
        assert run.wait_exit() == 78
        assert "nothing.toml" in sentence(run)
        assert "No such file" in sentence(run)


def test_a_command_that_does_not_exist_ends_with_3(folder):
    """`serve -- CMD` with a command nobody has says so and ends as never ready, at once."""
    control = f"127.0.0.1:{free_port()}"
    argv = [
        "--control",
        control,
        "--state-dir",
        str(folder / "state"),
        "--",
        "no-such-engine",
        "-x",
    ]
    with daemon(folder, argv=argv) as run:
        assert run.wait_exit() == 3
        assert "command not found: no-such-engine" in sentence(run)
        assert "PATH" in sentence(run)


@pytest.mark.parametrize("status", [0, 3])
def test_an_engine_that_always_ends_at_once_is_given_up_with_3(folder, status):
    """Status 0 is no excuse: three fruitless restarts, EXHAUSTED, exit 3, each end in the ledger."""
    program = [sys.executable, "-c", f"import sys; print('hello'); sys.exit({status})", str(folder)]
    settings = {"command": program, "port": None}
    with daemon(folder, settings, supervisor={"exit_when": "all"}) as run:
        assert run.wait_exit(60) == 3
        text = sentence(run)
        assert text.count("incarnation") >= 4
        assert "3 restarts in a row reached neither READY nor a served request" in text
        assert text.count('"kind": "CHILD_DIED"') == 4
        assert f"ended with exit status {status}" in text


def test_a_port_held_by_somebody_else_is_named_and_not_charged(folder):
    """The holder's pid is in the reason, the budget is untouched, and a free port starts the engine."""
    port = free_port()
    stranger = subprocess.Popen(
        [sys.executable, ENGINES, "listen", str(port), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"listening\n"
        command = [sys.executable, ENGINES, "api", str(folder), "{port}"]
        with daemon(
            folder, {"port": port, "command": command, "restart": {"backoff": ["200ms"]}}
        ) as run:
            view = run.wait_state("backoff")
            assert f"port {port} is held by pid {stranger.pid}" in view["reason"]
            assert view["restarts_in_window"] == 0
            stranger.communicate(timeout=10)
            assert run.wait_ready()["restarts_in_window"] == 0
    finally:
        stranger.kill()
        stranger.communicate()


def test_a_port_that_stays_held_is_waited_for_only_so_often(folder):
    """Six tries, then FAILED with the holder's name, and the daemon ends as never ready."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        settings = {"port": port, "restart": {"backoff": ["10ms"]}}
        with daemon(folder, settings, supervisor={"exit_when": "all"}) as run:
            assert run.wait_exit() == 3
            assert f"port {port} is held by pid {os.getpid()}" in sentence(run)
            assert "started, pid" not in run.log()


def test_a_control_port_that_is_held_ends_the_daemon_before_any_engine(folder):
    """Two daemons cannot share a control address: the second says which, and starts nothing."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        with daemon(folder, supervisor={"control": f"127.0.0.1:{port}"}) as run:
            assert run.wait_exit() == 78
            assert f"127.0.0.1:{port}" in sentence(run)
            assert "started, pid" not in run.log()


def test_a_state_folder_that_is_a_file_ends_with_78(folder):
    """A file in the place of state_dir is named."""
    (folder / "state").write_text("")
    with daemon(folder) as run:
        assert run.wait_exit() == 78
        assert f"{folder}/state" in sentence(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
@pytest.mark.parametrize(
    ("given", "words"), [("state", "belongs to uid 65534"), ("other", "ermission denied")]
)
def test_a_state_folder_of_somebody_else_ends_with_78(folder, given, words):
    """A daemon that may not write in another user's folder, or not even look, says so."""
    state = folder / "state" if given == "state" else folder / "other" / "state"
    state.mkdir(parents=True)
    (folder / given).chmod(0o700)
    os.chown(folder / given, 65534, 65534)
    # Another user could not read a checkout under /root. This user without capabilities can, and is
    # as much a stranger to the folder.
    before = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    with daemon(folder, before=before, supervisor={"state_dir": str(state)}) as run:
        assert run.wait_exit() == 78
        assert str(state) in sentence(run)
        assert words in sentence(run)


def test_a_state_folder_in_use_names_its_daemon(folder):
    """The second daemon on one state_dir ends with 78 and the first one's pid; the first goes on."""
    with daemon(folder, {"command": ["sleep", "1000", str(folder)][:2], "port": None}) as first:
        first.wait_ready()
        with daemon(folder) as second:
            assert second.wait_exit() == 78
            assert f"pid {first.process.pid}" in second.log()
        assert first.engine()["state"] == "ready"


def test_boards_without_a_place_are_said_and_end_with_3(folder):
    """A shm folder that does not exist is named with what must be checked; nothing is started."""
    supervisor = {"shm": str(folder / "no-such-shm"), "exit_when": "all"}
    with daemon(folder, supervisor=supervisor) as run:
        assert run.wait_exit() == 3
        assert "no-such-shm" in sentence(run)
        assert "is a tmpfs" in sentence(run)
        assert "started, pid" not in run.log()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_shm_is_said_before_the_engine_starts(folder):
    """A tmpfs too small for a board is an error in words now, not a SIGBUS in an engine later."""
    small = folder / "shm"
    small.mkdir()
    script = f'mount -t tmpfs -o size=256k none {small} && exec "$@"'
    before = ["unshare", "-m", "sh", "-c", script, "sh"]
    supervisor = {"shm": str(small), "exit_when": "all"}
    with daemon(folder, supervisor=supervisor, before=before) as run:
        assert run.wait_exit() == 3
        assert "no room for the heartbeat board" in sentence(run)
        assert "started, pid" not in run.log()


@pytest.fixture
def unreadable(folder) -> Iterator[Daemon]:
    with daemon(folder) as run:
        run.wait_ready()
        yield run


def test_a_board_that_cannot_be_read_is_told_and_judging_goes_on(unreadable):
    """Garbage in the place of the board is a fault in the events; an exit is still seen."""
    (board,) = [
        p for p in Path("/dev/shm").iterdir() if p.name.startswith(f"stallwatch-{unreadable.name}-")
    ]
    with (board / "board").open("r+b") as file:  # in place: a shorter file would kill the engine
        file.write(b"\xff" * 32)
    unreadable.wait(lambda: any(e["type"] == "fault" for e in unreadable.events()), "a fault")
    os.kill(unreadable.engine()["root_pid"], 9)
    assert unreadable.wait_stall()["kind"] == "CHILD_DIED"
    unreadable.wait_ready(2)


def no_pyspy(folder: Path) -> list[str]:
    """A stallwatch whose interpreter has no py-spy beside it, started in its stead."""
    fake = folder / "bin"
    fake.mkdir()
    (fake / "python").symlink_to(sys.executable)
    code = "import sys; from stallwatch.cli.main import main; sys.argv[0] = 'stallwatch'; sys.exit(main(sys.argv[2:]))"
    return [str(fake / "python"), "-c", code]


def test_without_pyspy_the_stall_is_declared_all_the_same(folder):
    """No py-spy: the report says so, has the next rung, and the engine is restarted."""
    site = next(p for p in sys.path if p.endswith("site-packages"))
    tree = Path(__file__).parents[2]
    roots = [str(tree / name) for name in ("supervisor", "engine", "kernels")]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join([*roots, site])}
    with daemon(folder, before=no_pyspy(folder), env=env) as run:
        run.wait_ready()
        run.order("worker", "stall")
        report = run.wait_stall()
        assert report["rung"] in ("faulthandler", "proc")
        assert "py-spy is not installed" in json.dumps(report)
        assert report["culprit"]["lane"] == "worker:0/model"
        run.wait_ready(2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a capability up")
def test_without_ptrace_the_stall_is_declared_all_the_same(folder):
    """A target that may not be traced costs the rung, not the verdict, and the report says why."""
    drop = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    with daemon(folder, None, "undumpable", before=drop) as run:
        run.wait_ready()
        run.order("worker", "stall")
        report = run.wait_stall()
        run.wait_ready(2)
        assert report["rung"] in ("faulthandler", "proc"), report["rung"]
        assert "refused" in json.dumps(report)


def test_no_process_of_a_refused_start_survives(folder):
    """After a bad start the state folder is free for the next daemon at once."""
    with daemon(
        folder, {"command": ["no-such-engine"], "port": None}, supervisor={"exit_when": "all"}
    ) as run:
        assert run.wait_exit() == 3
    with daemon(folder) as run:
        run.wait_ready()
        assert run.stop() == 0


def test_a_probe_that_names_no_host_is_refused_at_once(folder):
    """ready.http is checked before anything starts, not in a thread that dies over it."""
    with daemon(folder, {"ready": {"http": "http://"}}) as run:
        assert run.wait_exit() == 78
        assert "names no host" in sentence(run)


def test_a_file_in_the_place_of_a_state_folder_ends_with_78(folder):
    """state_dir/logs that is a file is named."""
    (folder / "state").mkdir()
    (folder / "state" / "logs").write_text("")
    with daemon(folder) as run:
        assert run.wait_exit() == 78
        assert f"{folder}/state/logs" in sentence(run)


def test_damaged_state_files_cost_their_content_and_nothing_else(folder):
    """Garbage in budget and tree files and in the database: told where it matters, READY all the same."""
    state = folder / "state"
    (state / "engines").mkdir(parents=True)
    name = f"{tag(folder)}-chat"
    (state / "engines" / f"{name}.json").write_text("[1, 2")
    (state / f"{name}.tree.json").write_text('{"engine": 5')
    (state / "stalls.db").write_bytes(b"garbage" * 1000)
    with daemon(folder) as run:
        run.wait_ready()
        assert run.said("the restart budget begins anew")
        run.order("worker", "exit1")
        run.wait_stall()
        assert run.wait_ready(2)["restarts_in_window"] == 1
