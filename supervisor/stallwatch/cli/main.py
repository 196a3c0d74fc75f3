"""`stallwatch`: the group, its commands by name only, and what errors look like.

Start-up stays under 150 ms because a command's module is imported when it is asked for, and none
of them imports the daemon's libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from stallwatch import __version__
from stallwatch.cli.output import ReaderGone, flush
from stallwatch.cli.settings import HELP, Settings, common, from_environment
from stallwatch.errors import StallwatchError

# name: (module, short help). The attribute is the name itself.
COMMANDS = {
    "serve": ("serve", "Start an engine and supervise it."),
    "gateway": ("gateway", "Serve clients in front of supervised engines."),
    "status": ("status", "All engines at a glance."),
    "describe": ("status", "One engine with its lanes and processes."),
    "top": ("top", "Engines, lanes and stalls, live in this terminal."),
    "stacks": ("verbs", "Take the stacks of an engine now."),
    "stalls": ("stalls", "Stalls, newest first."),
    "show": ("stalls", "The report of one stall."),
    "dump": ("dump", "Write a stall's report and files into a folder."),
    "events": ("events", "What happened, and with -f what happens."),
    "logs": ("events", "The last lines of an engine's output."),
    "restart": ("verbs", "Restart an engine; resets EXHAUSTED."),
    "drain": ("verbs", "Let an engine finish its requests, then stop it."),
    "pause": ("verbs", "Raise an engine's limits for a while."),
    "wait": ("wait", "Wait until an engine is ready, stalled or stopped."),
    "explain": ("explain", "What a kind of stall means and what to do about it."),
    "chaos": ("chaos", "Inject faults on purpose, and grade what is found."),
    "doctor": ("doctor", "Check what will be needed when something stalls."),
    "config": ("config", "Check or show a configuration."),
    "version": ("version", "The version."),
}
_EXAMPLE = {
    "gateway": "gateway --listen 127.0.0.1:8000 --hold 60s",
    "status": "status --check",
    "describe": "describe chat",
    "top": "top --readonly",
    "stacks": "stacks chat --native",
    "stalls": "stalls --state-dir /var/lib/stallwatch",
    "show": "show last",
    "dump": "dump 9f2c41aa -o /tmp/incident",
    "events": "events -f chat",
    "logs": "logs chat -n 200",
    "restart": "restart chat",
    "drain": "drain chat",
    "pause": "pause chat --for 30m",
    "wait": "wait chat --for ready --timeout 10m",
    "explain": "explain GIL_HELD",
    "chaos": "chaos inject chat gil --seed 7",
    "doctor": "doctor -o json",
    "config": "config check stallwatch.toml",
    "version": "version -o json",
}
_GROUP = "stallwatch.commands"  # entry points of other packages: engine, bench, ...
# Their help without importing them: torch would come with it.
_OTHERS = {
    "engine": "The embedded engine: serve a model, write small checkpoints.",
    "bench": "Load a server and measure it.",
}

EXAMPLES = """
\b
Examples:
  stallwatch serve -- vllm serve MODEL --port 8001
  stallwatch status
  stallwatch show ID
  stallwatch wait chat --for=ready --timeout=10m

\b
Exit codes: 0 ok, 1 error, 2 usage, 3 the asked-for condition is false,
4 no such engine, stall, process or lane, 5 no daemon answers,
124 wait timed out, 130 interrupted. `serve`: 0 asked to stop,
1 restart budget spent, 3 never became ready, 70 internal error,
78 bad configuration, 93 device lost.
"""


def _plugins() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {each.name: each for each in entry_points(group=_GROUP)}


class Commands(click.Group):
    """Commands by name. Other packages' commands are looked up only when ours do not match."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(set(_plugins()) - set(COMMANDS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            from importlib import import_module

            module = import_module(f"stallwatch.cli.{COMMANDS[cmd_name][0]}")
            command = getattr(module, cmd_name)
            assert isinstance(command, click.Command)
            if cmd_name in _EXAMPLE:  # `serve` has its own
                command.epilog = f"Example: stallwatch {_EXAMPLE[cmd_name]}"
            return command
        found = _plugins().get(cmd_name)
        if found is None:
            return None
        loaded = found.load()
        if not isinstance(loaded, click.Command):
            raise StallwatchError(f"{found.value} ({_GROUP}) is no command")
        return loaded

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, text) in COMMANDS.items()]
        others = {n: p for n, p in sorted(_plugins().items()) if n not in COMMANDS}
        rows += [(n, _OTHERS.get(n, f"from {p.value}")) for n, p in others.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=Commands,
    epilog=EXAMPLES,
    no_args_is_help=True,
    context_settings=HELP,
)
@click.version_option(__version__, prog_name="stallwatch", message="%(prog)s %(version)s")
@common()
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Supervise an LLM inference engine: name the stall, answer the client, restart the engine."""
    if not isinstance(ctx.obj, Settings):
        ctx.obj = from_environment()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_standard_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    found = from_environment()
    try:
        result = cli.main(args, prog_name="stallwatch", standalone_mode=False, obj=found)
        flush()
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except ReaderGone:
        # the reader has what it wanted; nothing may be flushed into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except StallwatchError as exc:
        _traceback(found)
        sys.stderr.write(f"stallwatch: {exc}\n")
        return exc.exit_code
    except Exception as exc:
        _traceback(found)
        hint = "" if found.verbose else "\n  run it again with -v for the traceback"
        sys.stderr.write(f"stallwatch: internal error: {type(exc).__name__}: {exc}{hint}\n")
        return found.crash_code
    return result if isinstance(result, int) else 0


def _open_standard_streams() -> None:
    """Closed by whoever started us, 0 to 2 would be the next files opened: a database on stderr."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w", closefd=False))


def _traceback(found: Settings) -> None:
    if found.verbose:
        import traceback

        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
