"""How a gateway behaves. Plain values, seconds; the [gateway] table and the flags both become one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a gateway process is told."""

    listen: str = "127.0.0.1:8000"
    engines: tuple[str, ...] = ()  # replicas of one engine; empty: every engine with a port
    upstreams: dict[str, str] = field(default_factory=dict)  # name: 'HOST:PORT' or 'unix:PATH'
    hold: float = 0.0
    hold_most: int = 256
    retry: str = "never"  # or "before-first-byte"
    max_in_flight: int = 1024
    max_connections: int = 4096
    deadline: float = 0.0  # of one request; 0: none
    first_token: float = 120.0
    between_tokens: float = 60.0
    whole_answer: float = 600.0  # of a request that is not streamed
    slow_client: float = 60.0  # a client that takes nothing for so long is dropped
    drain: float = 30.0
