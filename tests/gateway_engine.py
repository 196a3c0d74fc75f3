"""A small engine that streams: `python gateway_engine.py FOLDER PORT [counts]`. Its lanes are always well.

While FOLDER/quiet exists it sends nothing, and says nothing of that on its board either. A request
with {"lost": true} gets nothing ever. With `counts` its board tells its requests and tokens.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
from typing import Any

from stallwatch import heartbeat

TICK_S = 0.02
TOKENS = 500


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = ""
    count: Any = None

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.count:
            self.answer(asked)

    def answer(self, asked: dict[str, Any]) -> None:
        if asked.get("lost"):
            self.connection.recv(1)  # until the client gives it up
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n in range(asked.get("max_tokens", TOKENS)):
            while os.path.exists(os.path.join(self.folder, "quiet")):
                time.sleep(TICK_S)
            choice = {"index": 0, "delta": {"content": f"t{n}"}, "finish_reason": None}
            self.event(json.dumps({"id": "c", "model": "m", "created": 1, "choices": [choice]}))
            self.count.steps += 1
            time.sleep(TICK_S)
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class Count:
    """Requests inside, and tokens of all of them."""

    def __init__(self) -> None:
        self.inside = self.steps = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1


class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True


def main() -> None:
    Handler.folder, port = sys.argv[1], int(sys.argv[2])
    Handler.count = count = Count()
    board = heartbeat.attach(role="api")
    lane = board.lane("loop")
    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    board.ready()
    if "counts" in sys.argv:
        threading.Thread(target=tell, args=(count, board), daemon=True).start()
    while True:
        lane.idle()
        time.sleep(TICK_S)


def tell(count: Count, board: Any) -> None:
    """What a whole engine tells of itself: its front end's requests, and its model's steps."""
    lane, told = board.lane("model"), 0
    while True:
        board.pending(count.inside)
        steps = count.steps
        if steps > told:
            lane.progress(steps - told)
        told = steps
        lane.idle()
        time.sleep(TICK_S)


if __name__ == "__main__":
    main()
