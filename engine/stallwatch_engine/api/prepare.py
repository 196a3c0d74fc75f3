"""What an api needs before it has a worker: its options, tokenizer and template, and a listening socket.

Nothing heavy is imported: what the operator must correct is said before a worker is started, and at once.
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass

from stallwatch.heartbeat import Board, attach
from stallwatch_engine.api.text import BadTokenizer, TextCodec

SILENT_READER_S = 60.0
SEND_BUFFER = 1 << 18  # the kernel would let each connection grow to megabytes
BACKLOG = 1024


class CannotStart(Exception):
    """The command line, the tokenizer or the port is to be corrected; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An api that could serve as soon as it has a worker."""

    options: argparse.Namespace
    board: Board
    codec: TextCodec
    listener: socket.socket


def prepare(options: argparse.Namespace) -> Prepared:
    """Load the tokenizer, then listen. Raises CannotStart."""
    board = attach(role="api")
    board.lane("loop").enter("load_tokenizer", cls="start")
    try:
        codec = TextCodec.load(options.model)
    except BadTokenizer as error:
        raise CannotStart(str(error)) from error
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        problem = f"{options.host}:{options.port}: {error.strerror or error}"
        raise CannotStart(problem) from error
    return Prepared(options, board, codec, listener)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections hold little that is unread, and for a minute at most."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_READER_S * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="stallwatch_engine.api", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--served-name", help="name of the model in requests (the folder's name)")
    parser.add_argument("--worker-fd", type=int, default=-1, help="inherited socket")
    parser.add_argument("--worker-pid", type=int, help="process whose end is the worker's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--queue", type=_at_least_0, default=64, help="requests that may wait")
    parser.add_argument("--timeout", type=_seconds, default=600.0, help="default deadline, seconds")
    parser.add_argument("--drain", type=_seconds, default=30.0, help="seconds to finish at SIGTERM")
    return parser.parse_args(argv)


def _at_least_0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: 0 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: seconds, over 0 and at most a day")
    return value
