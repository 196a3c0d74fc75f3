"""Small engines: one file, `python daemon_engines.py WHAT FOLDER ...`. They take orders from files.

`FOLDER/ROLE.order` holds one word; whoever takes it (by unlinking) does it, once. FOLDER/release
ends what waits. What an engine sees of a FAILURE it prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from stallwatch import heartbeat

TICK_S = 0.01


def say(*words: object) -> None:
    """One line on stdout, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def order(folder: str, role: str) -> str:
    """The order for this role, or ''. Exactly one process gets it."""
    path = os.path.join(folder, f"{role}.order")
    taken = f"{path}.{os.getpid()}"
    try:
        os.rename(path, taken)
    except OSError:
        return ""
    with open(taken) as file:
        word = file.read().strip()
    os.unlink(taken)
    return word


def released(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "release"))


def wait_released(folder: str) -> None:
    while not released(folder):
        time.sleep(TICK_S)


def stuck_in_a_call(folder: str) -> None:
    wait_released(folder)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).pause()


def compute_for_ever() -> None:
    while True:
        pass


class WorkerLoop:
    """The worker's one lane."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.board = heartbeat.attach(role="worker", rank=0)
        self.ended = False

    def run(self) -> None:
        lane = self.board.lane("model")
        lane.enter("load_weights", cls="start")
        self.board.ready()
        say("worker up")
        step = 0
        while True:
            step += 1
            lane.enter("execute_model", step=step)
            word = order(self.folder, "worker")
            if word == "thread":
                self.ended = True
                return
            if word:
                self.obey(word)
            lane.progress(1)
            lane.idle()
            time.sleep(TICK_S)

    def obey(self, word: str) -> None:
        if word == "stall":
            stuck_in_a_call(self.folder)
        elif word == "gil":
            hold_the_gil()
        elif word == "spin":
            compute_for_ever()
        elif word == "pause":
            with self.board.pause("weight_update", seconds=0.5, owner="trainer"):
                wait_released(self.folder)
        elif word.startswith("exit"):
            os._exit(int(word[4:]))


def worker(folder: str) -> None:
    if "undumpable" in sys.argv:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    loop = WorkerLoop(folder)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    while True:
        time.sleep(0.5)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: Api

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(200, b"ok")

    def do_POST(self) -> None:
        """A request that lasts until FOLDER/release exists."""
        api = self.api
        api.count(1)
        try:
            while not released(api.folder) and not api.failed:
                time.sleep(TICK_S)
            status, body = (503, api.failed.encode()) if api.failed else (200, b"served")
            self.answer(status, body)
        finally:
            api.count(-1)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True


class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True


class Api:
    """The front end: HTTP, a pending gauge, one worker as its child."""

    def __init__(self, folder: str, port: int, flags: set[str]) -> None:
        self.folder, self.port, self.flags = folder, port, flags
        self.failed = ""
        self.board = heartbeat.attach(role="api", rank=0)
        self.lane = self.board.lane("loop")
        self.lock = threading.Lock()
        self.waiting = 0
        self.child: subprocess.Popen[bytes] | None = None

    def count(self, n: int) -> None:
        with self.lock:
            self.waiting += n
            self.board.pending(self.waiting)

    def main(self) -> None:
        self.lane.enter("start_workers", cls="start")
        if "deaf" in self.flags:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, self.stop)
        if "workerless" not in self.flags:
            argv = [sys.executable, os.path.abspath(__file__), "worker", self.folder, *self.flags]
            self.child = subprocess.Popen(
                argv, start_new_session="setsid" in self.flags, stdout=subprocess.PIPE
            )
            assert self.child.stdout is not None
            self.child.stdout.readline()  # the worker has attached
        if "orphan" in self.flags:
            orphan(self.folder)
        if self.port:
            Handler.api = self
            server = Server(("127.0.0.1", self.port), Handler)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self.board.ready()
        say("engine up")
        while True:
            self.lane.idle()
            time.sleep(TICK_S)
            self.turn()

    def turn(self) -> None:
        failure = self.board.failure()
        if failure is not None and not self.failed:
            self.failed = failure.id
            say("FAILURE", failure.id, failure.kind, failure.culprit)
        word = order(self.folder, "api")
        if word == "stall":
            self.lane.enter("handle_request")
            wait_released(self.folder)
        elif word.startswith("exit"):
            os._exit(int(word[4:]))
        elif word.startswith("print"):
            sys.stdout.write(("x" * 200 + "\n") * int(word[5:]))
            sys.stdout.flush()

    def stop(self, *_: object) -> None:
        say("SIGTERM")
        if self.child is not None:
            self.child.kill()
            self.child.wait()
        os._exit(0)


def orphan(folder: str) -> None:
    """A grandchild in a session of its own whose parents are gone."""
    argv = [sys.executable, os.path.abspath(__file__), "sleeper", folder]
    middle = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", middle, *argv], check=True)


def sleeper(folder: str) -> None:
    """Knows nothing of heartbeats; says that it lives."""
    with open(os.path.join(folder, f"sleeper.{os.getpid()}"), "w"):
        pass
    while True:
        time.sleep(60)


def loader(folder: str) -> None:
    """Attaches and loads until released; nothing moves meanwhile."""
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    lane.enter("load_weights", cls="start")
    wait_released(folder)
    board.ready()
    while True:
        lane.idle()
        time.sleep(TICK_S)


def argv(folder: str) -> None:
    """Prints what it was given and waits."""
    say("ARGV", repr(sys.argv[3:]))
    while True:
        time.sleep(60)


def listen(port: str) -> None:
    """A stranger on a port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", int(port)))
        sock.listen()
        say("listening")
        sys.stdin.read()


def main() -> None:
    what, folder, *rest = sys.argv[1:]
    if what == "api":
        port, *flags = rest
        Api(folder, int(port), set(flags)).main()
    with contextlib.suppress(KeyboardInterrupt):
        globals()[what](folder)


if __name__ == "__main__":
    main()
