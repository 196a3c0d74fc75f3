"""`dump`: a stall's report and files as a folder that can be handed on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from stallwatch.cli.output import clean, out, say
from stallwatch.cli.reports import Reports, reports
from stallwatch.cli.settings import HELP, common
from stallwatch.cli.stalls import full_id, report_lines
from stallwatch.errors import StallwatchError


@click.command(context_settings=HELP)
@click.argument("stall_id", metavar="[ID]", required=False)
@click.option("--all", "every", is_flag=True, help="All stalls that are kept.")
@click.option("-o", "--output-dir", default=".", metavar="DIR", help="Where to (default: here).")
@common(output=False, ledger=True)
def dump(stall_id: str | None, *, every: bool, output_dir: str) -> None:
    """Write the redacted report and files of a stall into DIR/ID. Overwrites nothing."""
    if every and stall_id:
        raise click.UsageError("give an ID or --all, not both")
    if not every and not stall_id:
        raise click.UsageError("give an ID, or --all")
    kept = reports()
    ids = [str(s["id"]) for s in kept.stalls(1000)] if every else [full_id(kept, str(stall_id))]
    if not ids:
        say("no stalls")
    for each in ids:
        folder = os.path.join(output_dir, safe_name(each))
        if every and os.path.lexists(folder):
            say(f"{folder} exists: left as it is")
            continue
        _write(kept, each, folder)
        out(folder)


def safe_name(name: str) -> str:
    """A file name that stays in its folder, whatever the daemon sent."""
    found = "".join(c if c.isalnum() or c in "-_.@" else "_" for c in name)[:200].lstrip(".")
    return found or "_"


def _write(kept: Reports, stall_id: str, folder: str) -> None:
    """The whole folder or none: it is filled under another name beside it."""
    report, names = kept.report(stall_id), kept.files(stall_id)
    if os.path.lexists(folder):
        raise _exists(folder)
    parent = os.path.dirname(folder) or "."
    with _parents(parent):
        try:
            part = tempfile.mkdtemp(prefix=".part-", dir=parent)
        except OSError as exc:
            raise StallwatchError(f"{folder} cannot be made: {exc.strerror}") from None
        try:
            _fill(part, report)
            for name in names:
                target = safe_name(name)
                target = f"artefact-{target}" if target.startswith("report.") else target
                _file(part, target, [kept.content(stall_id, name)])
            _rename(part, folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


@contextmanager
def _parents(folder: str) -> Iterator[None]:
    """The folder, made if it has to be; what was made for nothing is taken away again."""
    made: list[str] = []
    above = os.path.abspath(folder)
    while not os.path.lexists(above):
        made.append(above)
        above = os.path.dirname(above)
    try:
        os.makedirs(folder, exist_ok=True)
        yield
    except BaseException as exc:
        for each in made:
            with suppress(OSError):
                os.rmdir(each)
        if isinstance(exc, OSError):
            raise StallwatchError(f"{folder} cannot be written: {exc.strerror}") from None
        raise


def _rename(part: str, folder: str) -> None:
    try:
        os.rename(part, folder)
    except OSError as exc:
        if exc.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists(folder) from None
        raise


def _exists(folder: str) -> StallwatchError:
    return StallwatchError(
        f"{folder} exists and is not overwritten", hint="choose another folder with -o DIR"
    )


def _fill(folder: str, report: dict[str, Any]) -> None:
    _file(folder, "report.json", [json.dumps(report, indent=2).encode(), b"\n"])
    try:
        _file(folder, "report.txt", [f"{clean(line)}\n".encode() for line in report_lines(report)])
    except ImportError:
        say("report.txt left out: this build cannot render reports as text")


def _file(folder: str, name: str, parts: Iterable[bytes]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(folder, name), flags, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.writelines(parts)
