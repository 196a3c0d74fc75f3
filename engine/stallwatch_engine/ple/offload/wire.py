"""Messages between a rank and the offload process: fixed little-endian structures, one per packet."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from stallwatch_engine.ple.errors import ProtocolBroken

MAX_PACKET = 64 * 1024
_STEP = struct.Struct("<BxxxIQII")


class Kind(IntEnum):
    """The first byte of a packet."""

    REGISTER = 1  # rank -> offload: JSON, with the memory's descriptor
    SERVING = 2  # offload -> rank: all ranks are registered
    REQUEST = 3  # rank -> offload: a step
    READY = 4  # offload -> rank: its rows are stored
    FATAL = 5  # offload -> rank: a sentence; the process ends


@dataclass(frozen=True, slots=True)
class Step:
    """A request or its answer. `requests` is 0 in an answer."""

    kind: Kind
    slot: int
    seq: int
    tokens: int
    requests: int = 0

    def pack(self) -> bytes:
        return _STEP.pack(self.kind, self.slot, self.seq, self.tokens, self.requests)


@dataclass(frozen=True, slots=True)
class Text:
    """A message that carries bytes."""

    kind: Kind
    body: bytes = b""

    def pack(self) -> bytes:
        return bytes([self.kind]) + self.body[: MAX_PACKET - 1]


def parse(packet: bytes) -> Step | Text:
    """The message in a packet. ProtocolBroken for anything that is none."""
    kind = packet[0] if packet else 0
    if kind in {Kind.REQUEST, Kind.READY}:
        if len(packet) != _STEP.size:
            raise ProtocolBroken(f"a step message has {len(packet)} bytes; expected {_STEP.size}")
        _, slot, seq, tokens, requests = _STEP.unpack(packet)
        return Step(Kind(kind), slot, seq, tokens, requests)
    if kind in {Kind.REGISTER, Kind.SERVING, Kind.FATAL}:
        return Text(Kind(kind), packet[1:])
    raise ProtocolBroken(f"a message of unknown kind {kind}")


def send(sock: socket.socket, message: Step | Text, fd: int = -1) -> None:
    """Send one message, with a descriptor if given. OSError when the other side is gone or full."""
    packet = message.pack()
    if fd < 0:
        sock.send(packet)
    else:
        rights = array.array("i", [fd]).tobytes()
        sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def give_up(sockets: Sequence[socket.socket], error: BaseException) -> None:
    """Tell every rank why the process ends."""
    for sock in sockets:
        try:
            send(sock, Text(Kind.FATAL, f"{type(error).__name__}: {error}".encode()[:4096]))
        except OSError:
            continue  # gone already: its own pidfd says the rest


def receive(sock: socket.socket) -> tuple[Step | Text, int]:
    """(message, descriptor or -1). EOFError when the other side closed. Never blocks for long:
    call it when the socket is readable.
    """
    size = struct.calcsize("i")
    packet, control, flags, _ = sock.recvmsg(MAX_PACKET, socket.CMSG_SPACE(4 * size))
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // size * size])
    for surplus in fds[1:]:
        os.close(surplus)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolBroken("a message was cut short")
    if not packet:
        raise EOFError("the other side of the PLE socket is closed")
    return parse(packet), fds[0] if fds else -1
