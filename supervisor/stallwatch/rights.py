"""Who else may read a file of ours that holds a secret. Standard library only: the CLI asks it too."""

from __future__ import annotations

import grp
import os
import pwd
import stat

_GROUP_MORE = stat.S_IWGRP | stat.S_IXGRP


def is_loose(status: os.stat_result) -> bool:
    """Others may read, write or run it, or a group that is more than the reader's own.

    0640 root:stallwatch is how a service gets its file, and 0440 root:root is how systemd's
    credentials look (the group's bits are the mask of an ACL there): neither lets anybody else in.
    """
    mode = status.st_mode
    if mode & (stat.S_IRWXO | _GROUP_MORE):
        return True
    return bool(mode & stat.S_IRGRP) and not _group_is_ours(status)


def refusal(status: os.stat_result, where: str) -> tuple[str, str]:
    """What is wrong with a loose file's mode, and its mend."""
    return (
        f"mode {stat.S_IMODE(status.st_mode):04o} lets others at it",
        f"chmod 600 {where}, or root's file with mode 640 and a group of the daemon's own",
    )


def _group_is_ours(status: os.stat_result) -> bool:
    """Root chose one of our groups for its file, or it is our file and a group of us alone."""
    if status.st_uid == 0:
        return status.st_gid in {0, os.getegid(), *os.getgroups()}
    return status.st_uid == os.geteuid() and status.st_gid == os.getegid() and _alone(status.st_gid)


def _alone(gid: int) -> bool:
    """The group is called as we are and has no other member: not the `users` of a whole machine."""
    try:
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and not set(group.gr_mem) - {name}
