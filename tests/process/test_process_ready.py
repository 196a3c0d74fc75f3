from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time

import pytest

from process_helpers import subreaper
from stallwatch.board.image import BoardImage, ProcessImage
from stallwatch.errors import ConfigError
from stallwatch.process import preflight as pf
from stallwatch.process.oom import OomCounter
from stallwatch.process.ready import (
    Foreign,
    NotListening,
    Probe,
    Ready,
    all_ready,
    ask,
    port_owner,
)
from stallwatch.process.rundir import RunDir, inductor_cache
from stallwatch.testing import tree as trees
from stallwatch.testing.tree import tree

pytestmark = pytest.mark.process

LISTENER = trees._HEAD + (
    "import socket; s = socket.create_server(('127.0.0.1', {port})); print(s.getsockname()[1]);"
    "child(rest); rest()"
)


@pytest.fixture
def reaper():
    with subreaper() as it:
        yield it


@pytest.fixture
def foreign():
    """A server that is nobody's member; (pid, port)."""
    server = subprocess.Popen(
        trees.argv(LISTENER.format(port=0)), stdout=subprocess.PIPE, start_new_session=True
    )
    yield server.pid, int(trees.read_line(server.stdout.fileno()))
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate(timeout=10)


@pytest.fixture
def served():
    """A TCP server in a thread that answers each connection with the given pieces."""
    pieces: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve():
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                for piece in pieces:
                    try:
                        peer.sendall(piece)
                    except OSError:
                        break
                    if stop.wait(0.02):
                        break

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1], pieces
    stop.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_members_socket_is_ready(reaper):
    """The listening socket belongs to a member, by inode; a child that inherited it counts too."""
    with tree(LISTENER.format(port=0), reaper=reaper) as t:
        port = int(trees.read_line(t.child.output))
        t.members.scan()

        assert isinstance(port_owner(port, t.members.members()), Ready)
        assert port_owner(port, [t.child.pid]) == Ready(t.child.pid)


def test_a_foreign_server_is_not_ready(foreign):
    """Somebody else's answer on our port is named, not believed."""
    _, port = foreign
    found = port_owner(port, [os.getpid()])

    assert isinstance(found, Foreign)
    assert "(not ours)" in found.words
    assert f"port {port} is answered by pid" in found.words


def test_one_foreign_listener_is_enough(reaper):
    """Where two share a port (SO_REUSEPORT), clients may meet the other one: not READY."""
    program = LISTENER.replace("{port}))", "{port}), reuse_port=True)")
    with tree(program.format(port=0), reaper=reaper) as t:
        port = int(trees.read_line(t.child.output))
        with socket.create_server(("127.0.0.1", port), reuse_port=True):
            found = port_owner(port, [t.child.pid])

    assert isinstance(found, Foreign)
    assert found.pid == os.getpid()


def test_nobody_listens():
    """A port without a listener is neither ours nor foreign; a bound one that does not listen too."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))

        assert port_owner(bound.getsockname()[1], [os.getpid()]) == NotListening()


def test_a_busy_port_names_its_holder():
    """Pre-flight says which process holds the port, and what to do."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        with pytest.raises(pf.StillHeld) as error:
            pf.preflight(port=port)

    assert error.value.holders == (os.getpid(),)
    assert f"port {port} is held by pid {os.getpid()}" in error.value.message
    assert "kill" in error.value.hint


def test_time_wait_is_not_busy():
    """A port whose last connection is in TIME_WAIT may be used: only LISTEN counts."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    peer, _ = server.accept()
    peer.close()  # the side that closes first keeps TIME_WAIT
    client.recv(1)
    client.close()
    server.close()
    with open("/proc/net/tcp", encoding="ascii") as table:
        assert any(f":{port:04X} " in line and " 06 " in line for line in table)

    pf.preflight(port=port)


def test_an_old_incarnation_blocks_the_next(reaper):
    """A member that still lives is named; a reused pid is not taken for it."""
    with tree(trees.SLEEPER, reaper=reaper) as t:
        t.pids()
        with pytest.raises(pf.StillHeld, match=f"pid {t.child.pid}"):
            pf.preflight(port=None, old_members=t.members.members())

        pf.preflight(port=None, old_members={t.child.pid: 1})


def test_held_gpu_memory_names_the_holders():
    """The gate's answer becomes an error with pid, size and device; no GPU says nothing."""

    class Held:
        def over_baseline(self):
            return (pf.GpuHolder(os.getpid(), "GPU 0", 512),)

    with pytest.raises(pf.StillHeld, match="512 MiB on GPU 0") as error:
        pf.preflight(port=None, gpu=Held())
    assert error.value.holders == (os.getpid(),)
    pf.preflight(port=None, gpu=pf.NoGpu())


def test_a_probe_reads_the_status(served):
    """200 to 399 is ready, 503 is not."""
    port, pieces = served
    probe = Probe.parse("/health", port)
    for status, ok in ((200, True), (307, True), (404, False), (503, False)):
        pieces[:] = [b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status]
        answer = ask(probe)

        assert (answer.ok, answer.status) == (ok, status)


def test_a_dripping_server_cannot_hold_us(served):
    """One byte every 20 ms never trips the socket's own timeout; the deadline does."""
    port, pieces = served
    pieces[:] = [b"HTTP/1.1 200 OK\r\n"] + [b"x"] * 400
    began = time.monotonic()
    answer = ask(Probe.parse("/", port), 0.15)

    assert not answer.ok
    assert time.monotonic() - began < 2


def test_no_server_is_an_answer_too(tmp_path):
    """Refused connections, missing sockets and nonsense are said in words."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        refused = ask(Probe.parse("/", bound.getsockname()[1]))
    missing = ask(Probe.parse(f"unix:{tmp_path}/none:/health", None))

    assert (refused.ok, refused.status) == (False, 0)
    assert "refused" in refused.detail
    assert "No such file" in missing.detail


def test_a_unix_socket_can_be_asked(tmp_path):
    """unix:/path:/health asks the server behind the socket."""
    path = str(tmp_path / "e.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer():
            peer, _ = listener.accept()
            with peer:
                request = peer.recv(1000)
                status = 200 if request.startswith(b"GET /ready HTTP") else 500
                peer.sendall(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)

        thread = threading.Thread(target=answer)
        thread.start()
        found = ask(Probe.parse(f"unix:{path}:/ready", None))
        thread.join()

    assert found.ok


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        ("/health", Probe("http", "127.0.0.1", 9, "/health")),
        ("https://h/ready?x=1", Probe("https", "h", 443, "/ready?x=1")),
        ("http://[::1]:8/", Probe("http", "::1", 8, "/")),
        ("unix:/run/e.sock:/health", Probe("unix", "/run/e.sock", 0, "/health")),
        ("unix:///run/e.sock", Probe("unix", "/run/e.sock", 0, "/")),
    ],
)
def test_addresses_are_understood(text, probe):
    """A path, an http(s) URL or a unix socket."""
    assert Probe.parse(text, 9) == probe


@pytest.mark.parametrize("text", ["health", "ftp://x/", "unix:relative", "http://", "http://h:x/"])
def test_other_addresses_are_mistakes(text):
    """What is no address is refused with the three forms that are."""
    with pytest.raises(ConfigError) as error:
        Probe.parse(text, 9)
    assert "unix:" in error.value.hint


def test_every_attached_process_must_be_ready():
    """None attached: not known. One that is not ready: not ready. Those that left do not count."""

    def image(*processes):
        return BoardImage(1, 0, processes=processes)

    def process(rank, *, ready, detached=False):
        return ProcessImage(rank, 1, 1, "worker", rank, ready, 0, 0, detached=detached)

    assert all_ready(None) is None
    assert all_ready(image()) is None
    assert all_ready(image(process(0, ready=True), process(1, ready=False))) is False
    assert all_ready(image(process(0, ready=True), process(1, ready=False, detached=True)))


def test_a_run_folder_is_short_private_and_removed(tmp_path):
    """TMPDIR is under the user's, sockets fit in 107 bytes, caches stay, removal leaves nothing."""
    long = tmp_path / ("x" * 80)
    long.mkdir()
    env = {"TMPDIR": str(long)}
    run = RunDir.create("chat", 2, env=env)
    new = run.environment(env)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"{new['VLLM_RPC_BASE_PATH']}/{'u' * 36}")
    (long / "outside").write_text("stay")
    os.symlink(long / "outside", f"{run.path}/link")

    assert new["TMPDIR"].startswith(str(long) + "/sw-chat-2-")
    assert os.stat(run.path).st_mode & 0o777 == 0o700
    assert new["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{long}/torchinductor_")
    assert inductor_cache({"TORCHINDUCTOR_CACHE_DIR": "/x"}) == "/x"
    assert run.remove()
    assert [os.path.exists(path) for path in run.paths()] == [False] * len(run.paths())
    assert os.listdir(long) == ["outside"]


def test_out_of_memory_is_counted_in_both_versions_of_cgroups(tmp_path):
    """The file of the process's own cgroup is found, and growth is noticed once."""
    proc, root = tmp_path / "proc", tmp_path / "cg"
    for pid, line, file in (
        (1, "0::/a/b", root / "a/b/memory.events"),
        (2, "4:memory:/host/path", root / "memory/memory.oom_control"),
    ):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cgroup").write_text(f"9:pids:/\n{line}\n")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("low 0\noom_kill 3\n")
        counter = OomCounter.of(pid, proc=proc, root=root)

        assert not counter.grew()
        file.write_text("low 0\noom_kill 4\n")
        assert counter.grew()
        assert not counter.grew()
    assert not OomCounter.of(3, proc=proc, root=root).grew()


def test_our_own_cgroup_can_be_read():
    """On this machine the counter of this process is found, if the kernel has one."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        groups = file.read()
    if "memory" not in groups and not os.path.exists("/sys/fs/cgroup/memory.events"):
        pytest.skip("no memory cgroup here")

    assert OomCounter.of(os.getpid()).read() is not None
