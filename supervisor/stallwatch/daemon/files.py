"""How many files the daemon may have open: enough, or a sentence before anything is started."""

from __future__ import annotations

import resource

from stallwatch.errors import ConfigError

LEAST = 256  # sockets, pipes, the ledger, and a few files for each process of an engine
ENOUGH = 4096


def ensure_files() -> int:
    """Raise the soft limit towards ENOUGH, as far as the hard one lets us; returns what it is.

    Without room a spawn, a look or a report fails in the middle of an incident. Raises ConfigError
    when less than LEAST is to be had.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH:
        return soft
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if most < LEAST:
        raise ConfigError(
            f"at most {most} files may be open in this process, and {LEAST} are the least to work with",
            where="RLIMIT_NOFILE",
            hint=f"raise it: ulimit -n {ENOUGH} in the shell, LimitNOFILE={ENOUGH} in a systemd unit, "
            f"--ulimit nofile={ENOUGH} for a container",
        )
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most, soft)
