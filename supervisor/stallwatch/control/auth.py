"""Who may do what: bearer token, unix socket, loopback, Host names."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from stallwatch import rights
from stallwatch.errors import ConfigError

TOKEN_ENV = "STALLWATCH_TOKEN"  # noqa: S105  (the name of a variable)
MIN_TOKEN = 16
_MAX_TOKEN_FILE = 4096


class Access(Enum):
    """What a request may do. READ is never enough for a mutation, a live stack, logs or files."""

    NONE = 0
    READ = 1
    FULL = 2


def clean_token(raw: str, *, where: str) -> str:
    """The token without surrounding white space; ConfigError when it cannot be one."""
    token = raw.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            "the token must be one word of printable ASCII",
            where=where,
            hint="make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"the token is shorter than {MIN_TOKEN} characters",
            where=where,
            hint="make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token


def load_token(path: str | None = None, env: Mapping[str, str] = os.environ) -> str | None:
    """The token from the file, else from STALLWATCH_TOKEN, else None. Never from a command line:
    every user of the machine can read those.
    """
    if path:
        try:
            with Path(path).open("rb") as file:
                status = os.fstat(file.fileno())
                raw = file.read(_MAX_TOKEN_FILE + 1)
        except OSError as exc:
            raise ConfigError(
                f"the token file cannot be read: {exc.strerror}",
                where=path,
                hint="give the file to the user that runs stallwatch, mode 0600",
            ) from None
        if len(raw) > _MAX_TOKEN_FILE:
            raise ConfigError("the token file is larger than 4 KiB", where=path)
        if rights.is_loose(status):
            wrong, mend = rights.refusal(status, path)
            raise ConfigError(f"it holds the control token, and {wrong}", where=path, hint=mend)
        return clean_token(raw.decode("utf-8", "replace"), where=path)
    if env.get(TOKEN_ENV):
        return clean_token(env[TOKEN_ENV], where=TOKEN_ENV)
    return None


def split_address(address: str, *, default_port: int = 9470) -> tuple[str, int]:
    """'HOST:PORT', '[V6]:PORT', ':PORT' or 'HOST' as (host, port). ConfigError when it is none."""
    host, port_text = address, str(default_port)
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(f"not an address: {address!r}", hint="write [::1]:9470")
        port_text = rest[1:] or port_text
    elif address.count(":") == 1:
        host, _, port_text = address.partition(":")
    if not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise ConfigError(f"not a port: {address!r}", hint="write HOST:PORT, like 127.0.0.1:9470")
    return host or "0.0.0.0", int(port_text)  # noqa: S104  (":9470" means every interface)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    # 3.11 does not call ::ffff:127.0.0.1 a loopback address
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def is_loopback(peer: str) -> bool:
    """True for an address literal of this machine's loopback."""
    ip = _ip(peer)
    return ip is not None and ip.is_loopback


def binds_loopback_only(host: str) -> bool:
    """True when every address that `host` means is a loopback address."""
    if _ip(host) is not None:
        return is_loopback(host)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(is_loopback(str(entry[4][0])) for entry in found)


@dataclass(frozen=True)
class Auth:
    """The rules of one control address."""

    token: str | None = field(default=None, repr=False)
    hosts: frozenset[str] = frozenset({"localhost", "127.0.0.1", "::1"})
    any_ip_host: bool = False  # bound to a wildcard: every address literal is a name of ours

    @classmethod
    def for_address(
        cls, control: str, *, token: str | None = None, hosts: Iterable[str] = ()
    ) -> Auth:
        """The rules for listening at `control`; ConfigError when that would be open to others.

        An empty address means no TCP at all.
        """
        if not control:
            return cls(token)
        host, _ = split_address(control)
        if token is None and not binds_loopback_only(host):
            raise ConfigError(
                f"control = {control!r} is reachable from other machines and there is no token",
                hint="set STALLWATCH_TOKEN or a token file, or listen at 127.0.0.1:9470",
            )
        ip = _ip(host)
        names = cls.hosts | {host.lower()} | {name.lower().strip("[]") for name in hosts}
        return cls(token, names, any_ip_host=ip is not None and ip.is_unspecified)

    def token_matches(self, authorization: str | None) -> bool:
        """Constant-time comparison of an Authorization header with our token."""
        if self.token is None or authorization is None:
            return False
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), self.token.encode())

    def host_allowed(self, header: str | None) -> bool:
        """True when the Host header names us: a page that rebinds its own name does not get in."""
        if not header:
            return False
        if header.startswith("["):
            name = header[1:].partition("]")[0]
        else:
            name = header.rpartition(":")[0] if header.count(":") == 1 else header
        name = name.lower().rstrip(".")
        return name in self.hosts or (self.any_ip_host and _ip(name) is not None)

    def access(self, *, unix: bool, peer: str | None, authorization: str | None) -> Access:
        """What a request may do. `peer` None on TCP (it hung up already) is a stranger."""
        if unix or self.token_matches(authorization):
            return Access.FULL
        return Access.READ if peer is not None and is_loopback(peer) else Access.NONE
