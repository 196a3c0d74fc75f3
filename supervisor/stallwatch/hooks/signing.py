"""Proof of who sent a webhook: HMAC-SHA256 over the time and the body. And where its key is from."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from stallwatch import rights
from stallwatch.config.hooks import HooksConfig
from stallwatch.errors import ConfigError

TIMESTAMP, SIGNATURE, DELIVERY = (
    "Stallwatch-Timestamp",
    "Stallwatch-Signature",
    "Stallwatch-Delivery",
)
MIN_SECRET = 16
_MAX_FILE = 4096
_MAKE = "make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"


def sign(secret: bytes, timestamp: int, body: bytes) -> str:
    """`v1=` and the HMAC-SHA256, in hex, of "TIMESTAMP.BODY" (timestamp in Unix seconds)."""
    return "v1=" + hmac.new(secret, b"%d." % timestamp + body, hashlib.sha256).hexdigest()


def load_secret(config: HooksConfig, env: MutableMapping[str, str] = os.environ) -> bytes:
    """The secret without surrounding white space; b'' when none is configured.

    A variable is taken out of the environment: engines and tools do not inherit it. Raises
    ConfigError, which never holds the secret.
    """
    if config.secret_file is not None:
        return _clean(_read(config.secret_file), str(config.secret_file))
    if not config.secret_env:
        return b""
    found = env.pop(config.secret_env, None)
    if found is None:
        raise ConfigError(
            f"[hooks] secret_env names {config.secret_env}, and no such variable is set",
            hint="set it for the daemon, or use secret_file",
        )
    return _clean(found.encode("utf-8", "surrogateescape"), config.secret_env)


def _read(path: Path) -> bytes:
    try:
        # Without waiting: a FIFO in its place has no writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(_MAX_FILE + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(
            f"the webhook's secret cannot be read: {error.strerror}",
            where=str(path),
            hint="give the file to the user that runs stallwatch, mode 0600",
        ) from None
    if not stat.S_ISREG(status.st_mode) or len(raw) > _MAX_FILE:
        raise ConfigError("no regular file of at most 4 KiB", where=str(path), hint=_MAKE)
    if rights.is_loose(status):
        wrong, mend = rights.refusal(status, str(path))
        raise ConfigError(f"it holds the webhook's secret, and {wrong}", where=str(path), hint=mend)
    return raw


def _clean(raw: bytes, where: str) -> bytes:
    secret = raw.strip()
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"the webhook's secret is shorter than {MIN_SECRET} bytes", where=where, hint=_MAKE
        )
    return secret
